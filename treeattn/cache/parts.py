"""The files of a saved cache: one rank's keys and values, written in blocks and read row by row.

Every row, a token of a sequence in one array of one layer, has a sum of its own. So a reader checks what it
takes, reads nothing else, and can say which row is damaged; the sums themselves are in the part's digest.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import files
from treeattn.attention.positions import Runs
from treeattn.attention.shape import CACHE_DTYPES
from treeattn.cache.index import Part
from treeattn.cache.placement import Reach, ordered
from treeattn.errors import ArgumentError, BackendError
from treeattn.partial import Array

if TYPE_CHECKING:
    from treeattn.cache.sharded import CacheLayer

GLOB = "part-*.safetensors"
#: What a job that was killed leaves of its files.
UNFINISHED = f".{GLOB}", ".index.json.*.part"
#: Tokens that are copied at once.
_BLOCK = 1 << 12


def write_part(directory: Path, layers: Sequence[CacheLayer]) -> Part:
    """Write this rank's file, under another name until it is whole. Raises `BackendError`."""
    plan, reach = layers[0]._plan, layers[0]._reach
    elements, tokens, batch = CACHE_DTYPES[str(plan.shape.kv_dtype)], reach.most, len(reach.totals)
    names = [f"layers.{number}.{name}" for number in range(len(layers)) for name in plan.names]
    shapes = [(batch, tokens, plan.shape.kv_heads, width) for _ in layers for width in plan.widths]
    tensors = {name: (elements, shape) for name, shape in zip(names, shapes, strict=True)}
    sums = {f"{name}.sums": np.zeros((batch, tokens), np.uint64) for name in names}
    header = files.tensors_header(tensors | {name: (t.dtype, t.shape) for name, t in sums.items()})
    digest = hashlib.sha256(header)
    try:
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=".part-", suffix=".safetensors")
        try:
            with open(handle, "wb") as file:
                file.write(header)
                arrays = [array for layer in layers for array in layer.arrays]
                for array, table in zip(arrays, sums.values(), strict=True):
                    for row, length in enumerate(reach.lengths.tolist()):
                        for begin, rows in _blocks(plan.device, array, row, length):
                            table[row, begin : begin + len(rows)] = _sums(rows)
                            file.write(rows.view(np.uint8).data)
                        file.write(bytes((tokens - length) * array[0, :1].nbytes))
                for table in sums.values():
                    digest.update(table.data)
                    file.write(table.data)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            name = f"part-{plan.rank:05}-{digest.hexdigest()[:16]}.safetensors"
            files.publish(temporary, directory / name)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise BackendError(
            f"{directory}: cannot be written ({error.strerror}); what was saved there before is as it was"
        ) from None
    return Part(name, size, digest.hexdigest(), _runs(plan.placement.own, tokens))


def read_rows(directory: Path, part: Part, layers: Sequence[CacheLayer], reach: Reach) -> None:
    """Copy those tokens of a part that are this rank's, up to `reach`. Nothing is asked of a file without
    one. Raises `ArgumentError`, which names a file that is missing, cut off or damaged."""
    plan, there = layers[0]._plan, Runs(part.runs)
    mine = plan.placement.own.positions(0, reach.most)
    index = there.all_below(mine)
    own = np.flatnonzero(there.all_below(mine + 1) > index)
    if not len(own):
        return
    file = _open(directory / part.file, part)
    for begin in range(0, len(own), _BLOCK):
        into = own[begin : begin + _BLOCK]
        taken, target = ordered(index[into]), ordered(into)
        for number, layer in enumerate(layers):
            for name, array in zip(plan.names, layer.arrays, strict=True):
                tensor = f"layers.{number}.{name}"
                rows = _checked(file, tensor, taken, mine[into])
                array[:, target] = plan.device.from_host(rows)


def _checked(file: files.CacheFile, name: str, taken: slice | Array, positions: Array) -> Array:
    """Tokens of a tensor, in memory of their own. positions: where they stand, for the error."""
    rows = np.ascontiguousarray(file[name][:, taken])
    wrong = (_sums(rows) != file[f"{name}.sums"][:, taken]).any(axis=0)
    if wrong.any():
        _, layer, array = name.split(".")
        where = f"{array} of layer {layer} at position {positions[wrong.argmax()]}"
        raise ArgumentError(f"{file.path}: damaged: {where}; save the cache again")
    return rows


def _open(path: Path, part: Part) -> files.CacheFile:
    if path.is_file() and path.stat().st_size != part.bytes:
        raise ArgumentError(f"{path}: damaged: {path.stat().st_size} bytes, and it had {part.bytes}")
    file = files.open_cache(path)
    with path.open("rb") as raw:
        digest = hashlib.sha256(raw.read(min(file.starts.values())))
    for name in sorted(file.tensors, key=file.starts.__getitem__):
        if name.endswith(".sums"):
            digest.update(np.ascontiguousarray(file[name]).data)
    if digest.hexdigest() != part.sha256:
        raise ArgumentError(f"{path}: damaged, or another file: its digest is not the index's")
    return file


def _blocks(device: Any, array: Array, row: int, length: int) -> Iterator[tuple[int, Array]]:
    """Tokens of a sequence, on the host: [tokens, kv_heads, width]."""
    for begin in range(0, length, _BLOCK):
        yield begin, np.ascontiguousarray(device.readable(array[row, begin : min(begin + _BLOCK, length)]))


def _sums(rows: Array) -> Array:
    """Of rows [.., kv_heads, width], uint64 [..]: any element that changes, changes its row's."""
    words = rows.view(np.uint8).reshape(*rows.shape[:-2], -1).view(np.uint64)
    return words @ (np.arange(words.shape[-1], dtype=np.uint64) * _ODD * np.uint64(2) + np.uint64(1))


_ODD = np.uint64(0x9E3779B97F4A7C15)


def _runs(own: Runs, tokens: int) -> tuple[tuple[int, int, int], ...]:
    """Of the first tokens of a shard."""
    rows = (row for row in own.table.tolist() if row[0] < tokens)
    return tuple((start, step, min(count, tokens - index)) for index, start, step, count in rows)
