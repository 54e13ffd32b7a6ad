"""What a cubin says of its kernels: resources from its ELF sections, instructions by nvdisasm.

Some of what a launch costs shows in the instructions alone. A division by a number that is only known at
launch is some 20 of them one behind the other; code that was not run lately is fetched as it runs; and each
round of loads that has to come back before the next can be sent is a latency of memory.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Resources", "instruction_counts", "read_resources"]

_SYMBOL_TABLE = 2
# Attributes of .nv.info that pair a symbol with a number: EIATTR_REGCOUNT and EIATTR_FRAME_SIZE.
_ATTRIBUTES = {0x2F: "registers", 0x11: "stack"}
_FORMAT_SIZED = 4  # EIFMT_SVAL: a size and as many bytes follow

#: Classes of instructions, as regular expressions over SASS.
_INSTRUCTIONS = {
    "load_16_bytes": r"\bLDG\.(\S+\.)?128\b",
    "copy_16_bytes": r"\bLDGSTS\S*\.128",
    "matrix_multiply": r"\bHMMA\.16816",
    "matrix_load": r"\bLDSM\.",
    "local_memory": r"\b(LDL|STL)\b",
    # How compilers divide integers: to float, rounded up, and the reciprocal; 64-bit ones by a call.
    "integer_division": r"\bI2F\S*\.RP\b|\bCALL\S*\s.*__cuda_sm\S*_(div|rem)_[su]",
}
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
_LABEL = re.compile(r"^(\.L_\w+):")
_BRANCH = re.compile(r"\bBRA\b.*\((\.L_\w+)\)")
_LOAD = re.compile(r"\bLDG(\S*)\s+(R\d+|RZ)")
# Only the main loop reads past the cache, multiplies matrices, or adds what lanes found of keys.
_STREAMED = re.compile(r"\bLDG\.\S*\.NA\.|\bHMMA\.|\bSHFL\.")


@dataclass(frozen=True, slots=True)
class Resources:
    """registers of a thread; stack: bytes of its local memory; shared: static bytes of a block."""

    registers: int = 0
    stack: int = 0
    shared: int = 0


def read_resources(cubin: bytes) -> dict[str, Resources]:
    """Resources of every kernel, by mangled name."""
    sections = _sections(cubin)
    symbols = _symbols(cubin, sections)
    found: dict[str, dict[str, int]] = {
        name.removeprefix(".text."): {} for name, _ in sections if name.startswith(".text.")
    }
    for name, header in sections:
        kernel = name.removeprefix(".nv.shared.")
        if kernel in found:
            found[kernel]["shared"] = header[5]
        if name == ".nv.info":
            for symbol, attribute, value in _attributes(cubin, header):
                if symbols[symbol] in found:
                    found[symbols[symbol]][attribute] = value
    return {kernel: Resources(**values) for kernel, values in found.items()}


def _sections(cubin: bytes) -> list[tuple[str, Any]]:
    """Name and header (name, type, flags, address, offset, size, link, ..) of each ELF section."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + i * size) for i in range(count)]
    names = headers[names_index][4]
    return [(_text(cubin, names + header[0]), header) for header in headers]


def _text(cubin: bytes, start: int) -> str:
    return cubin[start : cubin.index(b"\0", start)].decode()


def _symbols(cubin: bytes, sections: list[tuple[str, Any]]) -> list[str]:
    for _, header in sections:
        if header[1] == _SYMBOL_TABLE:
            strings = sections[header[6]][1][4]
            entries = range(header[4], header[4] + header[5], 24)
            return [_text(cubin, strings + struct.unpack_from("<I", cubin, at)[0]) for at in entries]
    return []


def _attributes(cubin: bytes, header: Any) -> list[tuple[int, str, int]]:
    result = []
    at, end = header[4], header[4] + header[5]
    while at < end:
        kind, attribute, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if kind == _FORMAT_SIZED:
            if attribute in _ATTRIBUTES and size == 8:
                symbol, value = struct.unpack_from("<II", cubin, at)
                result.append((symbol, _ATTRIBUTES[attribute], value))
            at += size
    return result


def instruction_counts(cubin: bytes, nvdisasm: str) -> dict[str, dict[str, int]]:
    """How often each class of `_INSTRUCTIONS` occurs in every kernel, by mangled name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [nvdisasm, "--print-code", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\.text\.(\S+):$", text, flags=re.MULTILINE)
    return {
        kernel: _counts(body) | {"instructions": len(code(body)), "load_rounds": load_rounds(body)}
        for kernel, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def _counts(body: str) -> dict[str, int]:
    return {name: len(re.findall(pattern, body)) for name, pattern in _INSTRUCTIONS.items()}


def code(body: str) -> list[str]:
    """The instructions of a kernel, but for the padding behind them."""
    found = _INSTRUCTION.findall(body)
    return [instruction for instruction in found if not instruction.startswith("NOP")]


def load_rounds(body: str) -> int:
    """How many rounds of loads from global memory have to come back one after another before the main loop,
    counted along the code as it lies there, all branches taken; without a main loop, in all of it.

    A round ends where something needs what a load of it brings. Asynchronous copies are not waited for before
    the loop.
    """
    rounds, pending = 0, set[str]()
    for instruction in _before_the_main_loop(body):
        load = _LOAD.search(instruction)
        if pending & set(_registers(instruction, written=load is not None)):
            pending.clear()
        width = _width(load[1]) if load else 0
        if load and load[2] != "RZ":
            rounds += not pending
            pending |= {f"R{int(load[2][1:]) + i}" for i in range(max(1, width // 4))}
    return rounds


def _width(suffixes: str) -> int:
    """Bytes that a load brings, by what follows its name."""
    named = re.search(r"\.(64|128|[US]8|[US]16)\b", suffixes)
    return int(named[1].lstrip("US")) // 8 if named else 4


def _registers(instruction: str, written: bool) -> list[str]:
    """Those that an instruction names; `written`: less the first, which a load only writes."""
    return re.findall(r"\bR\d+\b", instruction)[1 if written else 0 :]


def _before_the_main_loop(body: str) -> list[str]:
    """Instructions up to where the first loop begins that reads keys, or multiplies matrices."""
    lines, labels = [], {}
    for line in body.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        if instruction := _INSTRUCTION.search(line):
            lines.append(instruction[1])
    for end, instruction in enumerate(lines):
        branch = _BRANCH.search(instruction)
        begin = labels.get(branch[1], end + 1) if branch else end + 1
        if begin <= end and any(map(_STREAMED.search, lines[begin:end])):
            return lines[:begin]
    return lines
