"""The kernels as AMD's compilers see them, without a GPU: by clang with HIP's headers, as Debian has them.

hipcc is such a clang, and so is HIPRTC; this one knows newer GPUs than hipcc there. What it makes never ran.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["ARCHITECTURES", "Kernel", "assembly", "compiler_problem", "kernels"]

#: MI200 and MI300; both have wavefronts of 64 lanes.
ARCHITECTURES = ("gfx90a", "gfx942")

_CLANG = "clang-19"
_HEADER = Path("/usr/include/hip/hip_runtime.h")
_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")
# Debian's device libraries were made before gfx942; gfx940 is the same instruction set's first stepping.
_STANDS_IN = {"oclc_isa_version_942.bc": "oclc_isa_version_940.bc"}


class Kernel(NamedTuple):
    """registers: vector registers of a lane. stack: bytes of a lane. shared: bytes of a block. lanes: of a
    wavefront. keeps_subnormal: in float32 arithmetic."""

    registers: int
    stack: int
    shared: int
    lanes: int
    keeps_subnormal: bool


def compiler_problem() -> str | None:
    """Why nothing can be compiled for AMD's GPUs here, or None."""
    missing = [str(path) for path in (_HEADER, _LIBRARIES) if not path.exists()]
    missing += [] if shutil.which(_CLANG) else [_CLANG]
    return f"no {', no '.join(missing)}: on Debian 12, make amd-compiler" if missing else None


def assembly(code: str, expressions: Sequence[str], arch: str) -> str:
    """Assembly of kernels of one text. Kept among the temporary files by its content.

    Raises:
        subprocess.CalledProcessError: with what the compiler said in `stderr`.
    """
    templates = [name for name in expressions if "<" in name]
    wanted = [f"template __global__ void {name}(const AttentionArguments);" for name in templates]
    text = "\n".join(["#include <hip/hip_runtime.h>", code, *wanted, ""])
    kept = _folder() / f"{hashlib.sha256(f'{arch} {text}'.encode()).hexdigest()[:20]}.s"
    if not kept.exists():
        unfinished = kept.with_suffix(f".{os.getpid()}")
        command = [_CLANG, "-x", "hip", "-std=c++17", "-O3", "--rocm-path=/usr", "--cuda-device-only", "-S"]
        command += [
            f"--rocm-device-lib-path={_libraries()}",
            f"--offload-arch={arch}",
            "-o",
            str(unfinished),
            "-",
        ]
        subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=240)
        unfinished.replace(kept)
    return kept.read_text(encoding="utf-8")


def kernels(text: str) -> dict[str, Kernel]:
    """What assembly says of every kernel in it, by mangled name."""
    found = {}
    for name, body in re.findall(
        r"^\s*\.amdhsa_kernel (\S+)$(.*?)^\s*\.end_amdhsa_kernel$", text, re.M | re.S
    ):
        facts = {key: int(value) for key, value in re.findall(r"^\s*\.amdhsa_(\w+) (\d+)$", body, re.M)}
        found[name] = Kernel(
            registers=facts["next_free_vgpr"],
            stack=facts["private_segment_fixed_size"],
            shared=facts["group_segment_fixed_size"],
            lanes=32 if facts.get("wavefront_size32") else 64,
            keeps_subnormal=facts["float_denorm_mode_32"] == 3,
        )
    return found


@functools.cache
def _libraries() -> Path:
    """A folder of links to the device libraries, with the names that this compiler asks for."""
    folder = _folder() / "device-libraries"
    folder.mkdir(exist_ok=True)
    links = {path.name: path for path in _LIBRARIES.glob("*.bc")}
    links |= {name: _LIBRARIES / other for name, other in _STANDS_IN.items() if name not in links}
    for name, path in links.items():
        if not (folder / name).exists():
            (folder / name).symlink_to(path)
    return folder


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"treeattn-amd-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
