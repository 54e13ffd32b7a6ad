"""CUDA sources to cubins without a GPU or driver: by NVRTC from its wheel, else by nvcc."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["FLAGS", "CompileError", "compile_cubin", "compiler_name", "compiler_problem", "find_tool"]

#: As CuPy compiles.
FLAGS = ("-std=c++17", "-ftz=true")


class CompileError(RuntimeError):
    """What the compiler said."""


def compiler_name() -> str:
    """NVRTC or nvcc, with its version; empty where there is neither."""
    if _nvrtc() is not None:
        major, minor = ctypes.c_int(), ctypes.c_int()
        _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"NVRTC {major.value}.{minor.value}"
    if shutil.which("nvcc"):
        text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
        return f"nvcc {text.partition('release ')[2].partition(',')[0]}"
    return ""


def compiler_problem() -> str | None:
    """Why nothing can be compiled here, or None."""
    return None if compiler_name() else "neither NVRTC (pip install 'treeattn[nvrtc]') nor nvcc"


def compile_cubin(code: str, expressions: Sequence[str], arch: str) -> bytes:
    """The cubin of kernels of one text, for an architecture such as "90".

    Raises:
        CompileError: with the compiler's log.
    """
    if _nvrtc() is not None:
        return _compile_with_nvrtc(code, expressions, arch)
    return _compile_with_nvcc(code, expressions, arch)


def _compile_with_nvrtc(code: str, expressions: Sequence[str], arch: str) -> bytes:
    library, program = _nvrtc(), ctypes.c_void_p()
    options = [f"-arch=sm_{arch}", *FLAGS, "--device-as-default-execution-space"]
    strings = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    size = ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"treeattn.cu", 0, None, None)
    try:
        for expression in expressions:
            library.nvrtcAddNameExpression(program, expression.encode())
        if library.nvrtcCompileProgram(program, len(options), strings):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise CompileError(log.value.decode())
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _compile_with_nvcc(code: str, expressions: Sequence[str], arch: str) -> bytes:
    templates = [name for name in expressions if "<" in name]
    wanted = [f"template __global__ void {name}(const AttentionArguments);" for name in templates]
    with tempfile.TemporaryDirectory() as folder:
        unit, cubin = Path(folder) / "treeattn.cu", Path(folder) / "treeattn.cubin"
        unit.write_text("\n".join([code, *wanted, ""]), encoding="utf-8")
        command = ["nvcc", *FLAGS, f"-arch=sm_{arch}", "-cubin", str(unit), "-o", str(cubin)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise CompileError(result.stdout + result.stderr)
        return cubin.read_bytes()


@functools.cache
def _nvrtc() -> Any:
    """The library of the wheel nvidia-cuda-nvrtc, or None."""
    for folder in _wheel_folders():
        for path in sorted(folder.glob("*/lib/libnvrtc.so.*")):
            if re.fullmatch(r"libnvrtc\.so\.\d+", path.name):
                return ctypes.CDLL(str(path))
    return None


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: from a wheel, the PATH, or beside nvcc."""
    for folder in _wheel_folders():
        for path in folder.glob(f"*/bin/{name}"):
            return str(path)
    return shutil.which(name) or shutil.which(
        name, path=os.environ.get("CUDA_PATH", "/usr/local/cuda") + "/bin"
    )


def _wheel_folders() -> list[Path]:
    specification = importlib.util.find_spec("nvidia")
    return (
        [Path(folder) for folder in (specification.submodule_search_locations or [])] if specification else []
    )
