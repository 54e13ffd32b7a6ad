"""The CUDA sources as single texts, for NVRTC, nvcc and the emulator.

Headers of ours are put in place of their ``#include``, so that a module is one text: nothing depends
on include paths, and caches of compiled modules that look at the text see every change. ``#line``
makes compilers and sanitizers name the real file and line.
"""

from __future__ import annotations

import functools
import re

from treeattn.backends import kernel_folder

#: Options of every compiler.
OPTIONS = ("-std=c++17",)

_INCLUDE = re.compile(r'#include "([\w.]+)"')


@functools.cache
def source(name: str) -> str:
    """The text of ``kernels/cuda/<name>.cu`` with its headers in place, each once."""
    return "\n".join([*_lines(f"{name}.cu", set()), ""])


def _lines(file: str, seen: set[str]) -> list[str]:
    seen.add(file)
    text = (kernel_folder("cuda") / file).read_text(encoding="utf-8")
    lines = [f'#line 1 "kernels/cuda/{file}"']
    for number, line in enumerate(text.splitlines(), 1):
        include = _INCLUDE.fullmatch(line.strip())
        if include is None:
            lines.append("" if line == "#pragma once" else line)
        elif include[1] not in seen:
            lines += [*_lines(include[1], seen), f'#line {number + 1} "kernels/cuda/{file}"']
        else:
            lines.append("")
    return lines
