"""`RawModule`, a look-alike of ``cupy.RawModule`` that executes CUDA C++ on the processor.

The text is compiled by g++ with `cuda_on_cpu/cuda.h` in front of it; NumPy arrays stand for device
arrays.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.builds import built

_HEADERS = Path(__file__).parent / "cuda_on_cpu"
_FLAGS = (
    *(
        "-std=c++17",
        "-O2",
        "-g1",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-fPIC",
        "-shared",
        "-pthread",
    ),
    # Modules in one process must not share each other's variables, shared memory above all.
    *("-fvisibility=hidden", "-fno-gnu-unique"),
    *("-Wall", "-Wno-unknown-pragmas", "-Werror", "-DTREEATTN_EMULATOR"),
)
_SANITIZERS = {
    "": (),
    "thread": ("-fsanitize=thread",),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
}
WORKERS = min(2, os.cpu_count() or 1)


class EmulatorError(RuntimeError):
    """What the emulator has to say about a launch: a deadlock, a wrong mask, a misaligned copy."""


def compiler_problem() -> str | None:
    """Why the emulator cannot run here, or None."""
    if shutil.which("g++") is None:
        return "no g++ to compile the emulator with"
    if os.uname().machine not in ("x86_64", "aarch64"):
        return f"the emulator switches fibers on x86-64 and aarch64 only, not on {os.uname().machine}"
    return None


class RawModule:
    """Kernels from one text.

    Args:
        code: the text, or `path`, a file.
        options: compiler options; only -D counts here.
        name_expressions: the kernels, as C++ expressions: ``merge_partials``, ``kernel<float, 64>``.
        sanitizer: "", "thread" or "address".
    """

    def __init__(
        self,
        code: str,
        *,
        options: tuple[str, ...] = (),
        name_expressions: tuple[str, ...],
        sanitizer: str = "",
    ) -> None:
        exports = "".join(
            f"EXPORT_KERNEL(kernel_{i}, {_cluster(code, n)}, {n})\n" for i, n in enumerate(name_expressions)
        )
        text = f'#include "cuda.h"\n{code}\n{exports}'
        defines = tuple(option for option in options if option.startswith("-D"))
        self._library = ctypes.CDLL(str(_compiled(text, (*_flags(), *_SANITIZERS[sanitizer], *defines))))
        self._names = {name: f"kernel_{i}" for i, name in enumerate(name_expressions)}

    def get_function(self, name: str) -> Kernel:
        """The kernel of one of the name expressions."""
        return Kernel(name, getattr(self._library, self._names[name]))


class Kernel:
    """One kernel: called like a ``cupy.RawKernel``. Seeds choose the order of threads and blocks."""

    #: As CuPy has it; the emulator has no such limit.
    max_dynamic_shared_size_bytes = 0

    def __init__(self, name: str, function: Any) -> None:
        self.name = name
        self._function = function
        self.code = ctypes.cast(function, ctypes.c_void_p).value

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
        seed: int = 0,
        workers: int = WORKERS,
    ) -> None:
        """Run a grid to its end. An argument is a NumPy array (its address is passed) or one void
        scalar or 0-d structured array (its bytes are).

        Raises:
            EmulatorError: what no GPU would tell.
        """
        values = [_argument(value) for value in args]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        message = ctypes.create_string_buffer(512)
        sizes = [(ctypes.c_uint * 3)(*shape, *(1,) * (3 - len(shape))) for shape in (grid, block)]
        failed = self._function(
            *sizes,
            ctypes.c_size_t(shared_mem),
            pointers,
            ctypes.c_uint(seed),
            ctypes.c_int(workers),
            message,
            ctypes.c_size_t(len(message)),
        )
        if failed:
            raise EmulatorError(f"{self.name}: {message.value.decode()}")


@functools.cache
def libcuda() -> ctypes.CDLL:
    """The driver's library of this machine, which has no GPU."""
    text = (_HEADERS / "libcuda.c").read_text()
    return ctypes.CDLL(str(built(".so", ["gcc", "-O1", "-fPIC", "-shared", "-xc", "-"], stdin=text)))


def _cluster(code: str, expression: str) -> str:
    """How many blocks of this kernel are a cluster, as its declaration has it, or 0."""
    name = expression.partition("<")[0]
    found = re.search(rf"__cluster_dims__\((\w+), 1, 1\)[^{{;]*\b{name}\(", code)
    return found[1] if found else "0"


def _argument(value: Any) -> Any:
    if isinstance(value, np.void) or (
        isinstance(value, np.ndarray) and value.dtype.kind == "V" and value.size == 1
    ):
        return ctypes.create_string_buffer(value.tobytes(), value.dtype.itemsize)
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, int | np.int32):
        return ctypes.c_int(int(value))
    raise TypeError(f"a kernel argument of type {type(value).__name__}")


def _flags() -> tuple[str, ...]:
    """Hardware fma, where there is one, for speed: fmaf gives the same bits without."""
    try:
        has_fma = " fma " in Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        has_fma = False
    return (*_FLAGS, "-mfma") if has_fma else _FLAGS


def _compiled(text: str, flags: tuple[str, ...]) -> Path:
    command = ["g++", *flags, f"-I{_HEADERS}", "-x", "c++", "-"]
    try:
        return built(".so", command, *_headers(), stdin=text)
    except subprocess.CalledProcessError as error:
        raise EmulatorError(f"g++ refused the kernel:\n{error.stderr[:4000]}") from None


@functools.cache
def _headers() -> tuple[bytes, ...]:
    return tuple(header.read_bytes() for header in sorted(_HEADERS.iterdir()))
