"""KV caches in safetensors files: mapped, so that a rank touches only its own tokens, and written whole.

The safetensors library checks a file; the mapping is ours because the library cannot map a strided
slice, and copies bfloat16 through PyTorch.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from treeattn.errors import ArgumentError, BackendError
from treeattn.partial import Array

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


#: What this process has written so far, for whoever interrupts it.
kept: list[str] = []


@dataclass(frozen=True, slots=True)
class CacheFile:
    """The tensors of a file, memory-mapped and read-only, and its metadata strings."""

    path: Path
    tensors: dict[str, Array]
    metadata: dict[str, str]
    unsupported: dict[str, str]  # name -> dtype, of tensors that NumPy has no type for

    def __getitem__(self, name: str) -> Array:
        try:
            return self.tensors[name]
        except KeyError:
            if name in self.unsupported:
                raise ArgumentError(
                    f"{self.path}: tensor {name!r} is {self.unsupported[name]}, which is not supported"
                ) from None
            held = ", ".join(sorted(self.tensors)) or "none"
            raise ArgumentError(f"{self.path}: no tensor {name!r} in the file; it holds {held}") from None

    def scale(self) -> float | None:
        """The softmax scale that the file's metadata states, if any. Raises `ArgumentError`."""
        text = self.metadata.get("scale")
        try:
            value = None if text is None else float(text)
        except ValueError:
            value = math.nan
        if value is not None and not math.isfinite(value):
            raise ArgumentError(f"{self.path}: metadata 'scale' is {text!r}, not a finite number")
        return value


def open_cache(path: str | Path) -> CacheFile:
    """Map a safetensors file. Raises `ArgumentError` if it is missing, truncated or of another format."""
    path = Path(path)
    try:
        if not path.is_file():
            raise ArgumentError(f"{path}: {'is not an ordinary file' if path.exists() else 'no such file'}")
        with safe_open(path, framework="numpy"):
            pass  # the library checks the header against the file's length
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        data = np.memmap(path, np.uint8, "r", offset=8 + length) if path.stat().st_size > 8 + length else None
    except (OSError, SafetensorError, ValueError, struct.error) as error:
        raise ArgumentError(f"{path}: not a readable safetensors file ({_reason(error)})") from None
    metadata = header.pop("__metadata__", None) or {}
    tensors, unsupported = {}, {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            unsupported[name] = entry["dtype"]
            continue
        start, stop = entry["data_offsets"]
        raw = np.empty(0, np.uint8) if data is None else data[start:stop]
        try:
            tensors[name] = raw.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        except ValueError as error:  # NumPy's limits
            raise ArgumentError(f"{path}: tensor {name!r:.80} cannot be read ({error})") from None
    return CacheFile(path, tensors, metadata, unsupported)


def open_arrays(path: Path) -> dict[str, Any]:
    """Read the arrays of a .npz file, or map those of a safetensors file. Raises `ArgumentError`."""
    if path.suffix != ".npz":
        return open_cache(path).tensors
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = dict(archive)
        if strange := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
            raise ValueError(f"{strange[0]!r:.80} is not an array")
    except Exception as error:  # zipfile, zlib and NumPy have many types for what a file can be
        raise ArgumentError(f"{path}: not a readable .npz file ({_reason(error)})") from None
    # NumPy writes bfloat16 as two bytes without a meaning.
    return {name: a.view(ml_dtypes.bfloat16) if a.dtype == "V2" else a for name, a in arrays.items()}


def read_text(path: Path) -> str:
    """Read a text file. Raises `ArgumentError`."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        raise ArgumentError(f"{path}: cannot be read ({reason})") from None


def _reason(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error).strip().split("\n")[0] or type(error).__name__
    return f"{said:.200}"


def load_runs(
    tensor: Array,
    runs: Sequence[slice],
    progress: Callable[[int], object] = lambda _: None,
    block: int = 1 << 14,
) -> Array:
    """Copy the tokens of `runs` out of a mapped [batch, tokens, ...] tensor, and nothing else.

    `progress` is told the bytes after every block of tokens.
    """
    counts = [len(range(*run.indices(tensor.shape[1]))) for run in runs]
    shard = np.empty((tensor.shape[0], sum(counts), *tensor.shape[2:]), tensor.dtype)
    done = 0
    for run, count in zip(runs, counts, strict=True):
        mine = tensor[:, run]
        for start in range(0, count, block):
            stop = min(start + block, count)
            shard[:, done + start : done + stop] = mine[:, start:stop]
            progress(shard[:, done + start : done + stop].nbytes)
        done += count
    return shard


def output_writer(path: str | Path | None) -> Callable[[bytes], None]:
    """A function that writes a file whole or not at all: under a temporary name first, then renamed.

    Nothing lies on disk before it is called. Raises `ArgumentError` at once if the place cannot be
    written, before any work is done; `BackendError` if it cannot be after all, as on a full disk.
    With no path, the bytes go nowhere.
    """
    if path is None:
        return lambda _: None
    if _planted(Path(path)):
        raise ArgumentError(
            f"{path}: is another user's link in a folder that everybody can write; name another place"
        )
    target = Path(path).resolve()  # what a link points to is replaced, not the link
    if target.exists() and not target.is_file():
        raise ArgumentError(f"{path}: is not an ordinary file; name a file to write")
    os.unlink(_temporary_beside(target))  # found out now whether it can be written
    return lambda content: _replace(target, content)


def _planted(path: Path) -> bool:
    """Whether it is a link that Linux, where it protects links, does not follow: another user's, in a folder
    such as /tmp."""
    if not path.is_symlink():
        return False
    folder, link = path.parent.stat(), path.lstat()
    shared = stat.S_ISVTX | stat.S_IWOTH
    return folder.st_mode & shared == shared and link.st_uid not in (os.geteuid(), folder.st_uid)


def check_distinct(outputs: Sequence[Path | None], inputs: Sequence[Path | None] = ()) -> None:
    """Raise `ArgumentError` if two outputs, or an output and an input, are one file."""
    taken = {path.resolve() for path in inputs if path is not None}
    for path in outputs:
        if path is not None and path.resolve() in taken:
            raise ArgumentError(f"{path}: is named twice on this command line; write to another file")
        taken |= {path.resolve()} if path is not None else set()


def _replace(target: Path, content: bytes) -> None:
    temporary = _temporary_beside(target)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, target)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            reason = f"{target}: cannot be written ({error.strerror}); nothing of it was kept"
            raise BackendError(reason) from None
        raise
    kept.append(str(target))


def publish(temporary: str, target: Path) -> None:
    """Rename a whole file that `mkstemp` made, with the modes of an ordinary new one."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(temporary, 0o666 & ~mask)
    os.replace(temporary, target)


def _temporary_beside(target: Path) -> str:
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    except OSError as error:
        raise ArgumentError(f"{target}: cannot be written ({error.strerror}); name another place") from None
    os.close(handle)
    return temporary


def save_tensors(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file."""
    return save(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()}, metadata=dict(metadata)
    )


def tensors_header(tensors: Mapping[str, tuple[np.dtype[Any], Sequence[int]]]) -> bytes:
    """The beginning of a safetensors file of tensors (dtype, shape) that follow in this order."""
    names = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
