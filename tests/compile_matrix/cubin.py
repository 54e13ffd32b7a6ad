"""What a cubin says of its kernels: resources from its ELF sections, instructions by nvdisasm."""

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
}


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
        kernel: {name: len(re.findall(pattern, body)) for name, pattern in _INSTRUCTIONS.items()}
        for kernel, body in zip(parts[1::2], parts[2::2], strict=True)
    }
