"""Caches that last: written by the ranks of one job, read by those of another, whatever their number.

A saved cache is a directory: a safetensors file for each rank that wrote it, and ``index.json``, which is
written last, and names the files that count. Every row, a token of a sequence in one array of one layer, has
a sum of its own in the file: a reader checks what it takes, reads nothing else, and can say which row is
damaged.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from treeattn import files
from treeattn.attention.positions import Runs, check_owners
from treeattn.attention.shape import CACHE_DTYPES
from treeattn.cache.placement import LayerPlan, Reach, ordered
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.errors import ArgumentError, BackendError, TreeattnError
from treeattn.mpi.communicators import Agreement, collectively
from treeattn.partial import Array

if TYPE_CHECKING:
    from treeattn.cache.sharded import CacheLayer

NAME = "index.json"
#: Tokens that are copied at once.
_BLOCK = 1 << 12

_ODD = np.uint64(0x9E3779B97F4A7C15)


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's file, beside the index. runs: (start, step, count) of the positions of its tokens, in
    order."""

    file: Annotated[str, msgspec.Meta(pattern=r"^part-[0-9]{5,}-[0-9a-f]{16}\.safetensors\Z")]
    runs: tuple[tuple[int, int, int], ...]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """layout, capacity: of the cache that was saved. about: whatever its writer said of it."""

    format: Literal["treeattn.ShardedCache"] = "treeattn.ShardedCache"
    version: Literal[2] = 2
    layers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    kv_heads: int
    head_dim: int
    v_dim: int
    latent: bool
    dtype: str
    k_scale: tuple[float, ...] | None = None
    v_scale: tuple[float, ...] | None = None
    layout: str
    capacity: int
    totals: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    parts: tuple[Part, ...]
    about: dict[str, Any] = {}
    sha256: str = ""

    @property
    def held(self) -> dict[str, Any]:
        """What a `ShardedCache` for it is made with."""
        names = "kv_heads", "head_dim", "dtype", "v_dim", "k_scale", "v_scale"
        return {"batch": len(self.totals), **{name: getattr(self, name) for name in names}}

    def encode(self) -> bytes:
        """As the file's text, with its own digest."""
        plain = msgspec.structs.replace(self, sha256="")
        whole = msgspec.structs.replace(self, sha256=_digest(plain))
        return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def read_index(directory: str | Path) -> Index:
    """Raises `ArgumentError`: no saved cache, one of another version, or an index that is damaged."""
    path = Path(directory) / NAME
    if not path.is_file():
        raise ArgumentError(f"{directory}: no saved cache: there is no {NAME}")
    try:
        index = msgspec.json.decode(files.read_text(path), type=Index)
        everyone = [Runs(part.runs) for part in index.parts]
    except (msgspec.DecodeError, ArgumentError) as error:
        raise ArgumentError(f"{path}: damaged, or of another version ({error})") from None
    if index.sha256 != _digest(msgspec.structs.replace(index, sha256="")):
        raise ArgumentError(f"{path}: damaged: its digest is another than it says; save the cache again")
    check_owners(everyone)
    most = max(index.totals, default=0)
    if sum(runs.below(most) for runs in everyone) != most:
        raise ArgumentError(
            f"{path}: damaged: its files hold fewer tokens than it says; save the cache again"
        )
    return index


def save(comm: Communicator, layers: Sequence[CacheLayer], directory: Path, about: dict[str, Any]) -> None:
    """As `ShardedCache.save`. Collective.

    Files of a new cache have new names, and nothing but the index says which ones count: the directory is
    the old cache up to the moment in which the new index takes the place of the old one.
    """
    with contextlib.ExitStack() as claim:
        collectively(comm, lambda: None if comm.rank else claim.enter_context(_claimed(directory)), "save")
        own = directory / f"part-{comm.rank:05}-{secrets.token_hex(8)}.safetensors"
        try:
            index = _written(comm, layers, own, about)
            collectively(comm, lambda: None if comm.rank else _publish(directory, index))
        except TreeattnError:
            own.unlink(missing_ok=True)
            raise
        collectively(comm, lambda: None if comm.rank else _remove_others(directory, index))


def _written(comm: Communicator, layers: Sequence[CacheLayer], own: Path, about: dict[str, Any]) -> Index:
    plan, reach = layers[0]._plan, layers[0]._reach
    with Agreement(comm, "save") as agreed:
        for number, layer in enumerate(layers):
            if not np.array_equal(layer.totals, reach.totals):
                raise ArgumentError(
                    f"layer {number} holds {layer.totals.tolist()} tokens, the first one "
                    f"{reach.totals.tolist()}: a cache is saved when all layers have come as far"
                )
        agreed.must_match = {"the tokens": reach.totals.tolist(), "about": as_json(about)}
        try:
            _write(own, plan, layers, reach)
        except OSError as error:
            raise BackendError(
                f"{own.parent}: cannot be written ({error.strerror}); what was saved there is as it was"
            ) from None
        runs = (row for row in plan.placement.own.table.tolist() if row[0] < reach.most)
        held = tuple((start, step, min(count, reach.most - at)) for at, start, step, count in runs)
        agreed.share = Part(own.name, held)
    names = "kv_heads", "head_dim", "v_dim", "k_scale", "v_scale"
    return Index(
        **{name: getattr(plan.shape, name) for name in names},
        dtype=str(plan.shape.kv_dtype),
        layers=len(layers),
        latent=plan.latent,
        layout=plan.placement.name,
        capacity=layers[0].capacity,
        totals=tuple(reach.totals.tolist()),
        parts=tuple(agreed.gathered),
        about=about,
    )


def _write(path: Path, plan: LayerPlan, layers: Sequence[CacheLayer], reach: Reach) -> None:
    """This rank's keys and values, in blocks, and then their sums."""
    elements, tokens, batch = CACHE_DTYPES[str(plan.shape.kv_dtype)], reach.most, len(reach.totals)
    names = [f"layers.{number}.{name}" for number in range(len(layers)) for name in plan.names]
    shapes = [(batch, tokens, plan.shape.kv_heads, width) for _ in layers for width in plan.widths]
    tensors = {name: (elements, shape) for name, shape in zip(names, shapes, strict=True)}
    sums = {f"{name}.sums": np.zeros((batch, tokens), np.uint64) for name in names}
    with path.open("xb") as file:
        file.write(files.tensors_header(tensors | {name: (t.dtype, t.shape) for name, t in sums.items()}))
        arrays = [array for layer in layers for array in layer.arrays]
        for array, table in zip(arrays, sums.values(), strict=True):
            for row, length in enumerate(reach.lengths.tolist()):
                for begin in range(0, length, _BLOCK):
                    block = array[row, begin : min(begin + _BLOCK, length)]
                    rows = np.ascontiguousarray(plan.device.readable(block))
                    table[row, begin : begin + len(rows)] = _sums(rows)
                    file.write(rows.view(np.uint8).data)
                file.write(bytes((tokens - length) * array[0, :1].nbytes))
        for table in sums.values():
            file.write(table.data)
        file.flush()
        os.fsync(file.fileno())


def _publish(directory: Path, index: Index) -> None:
    """Let the index take the place of the one before."""
    for part in index.parts:
        if not (directory / part.file).is_file():
            raise ArgumentError(
                f"{directory / part.file}: not there for rank 0: name a directory that all ranks share"
            )
    _sync(directory)
    files.output_writer(directory / NAME)(index.encode())


def _remove_others(directory: Path, index: Index) -> None:
    """What belongs to the cache before, and what a job that was killed has left."""
    _sync(directory)
    kept = {part.file for part in index.parts}
    for path in [*directory.glob("part-*.safetensors"), *directory.glob(f".{NAME}.*.part")]:
        if path.name not in kept:
            with contextlib.suppress(OSError):
                path.unlink()


def agree(comm: Communicator, directory: Path) -> Index:
    """The index that all ranks read. Collective."""
    with Agreement(comm, "load") as agreed:
        index = read_index(directory)
        agreed.must_match = {f"the index of {directory}": index.sha256}
    return index


def read_layers(layers: Sequence[CacheLayer], directory: Path, index: Index) -> None:
    """Read this rank's tokens into empty layers.

    Raises `ArgumentError`, which names a file that is missing, cut off or damaged; nothing is asked of a
    file without one of its tokens.
    """
    plan, totals = layers[0]._plan, np.array(index.totals, np.int64)
    if plan.placement.limit is not None and totals.max() > plan.placement.limit:
        raise ArgumentError(
            f"{directory}: a sequence of {totals.max()} tokens exceeds the capacity of "
            f"{plan.placement.limit}: give a larger one"
        )
    reach = Reach(plan.placement, totals)
    for layer in layers:
        layer._reserve(reach)
    mine = plan.placement.own.positions(0, reach.most)
    for part in index.parts:
        there = Runs(part.runs)
        at = there.all_below(mine)
        own = np.flatnonzero(there.all_below(mine + 1) > at)
        if not len(own):
            continue
        file = files.open_cache(directory / part.file)
        for begin in range(0, len(own), _BLOCK):
            into = own[begin : begin + _BLOCK]
            for number, layer in enumerate(layers):
                for name, array in zip(plan.names, layer.arrays, strict=True):
                    taken = ordered(at[into])
                    rows = _checked(file, f"layers.{number}.{name}", taken, mine[into], array.shape)
                    array[:, plan.as_index(ordered(into))] = plan.device.from_host(rows)
    for layer in layers:
        layer._stand(reach)


def _checked(
    file: files.CacheFile, name: str, taken: slice | Array, positions: Array, shape: tuple[int, ...]
) -> Array:
    """Tokens of a tensor, in memory of their own. positions: where they stand, for the error. shape: of the
    array that they go to."""
    tensor = file[name]
    if tensor.ndim != 4 or (len(tensor), *tensor.shape[2:]) != (shape[0], *shape[2:]):
        raise ArgumentError(f"{file.path}: damaged: {name} has another shape than the index says")
    rows = np.ascontiguousarray(tensor[:, taken])
    wrong = (_sums(rows) != file[f"{name}.sums"][:, taken]).any(axis=0)
    if wrong.any():
        _, layer, array = name.split(".")
        where = f"{array} of layer {layer} at position {positions[wrong.argmax()]}"
        raise ArgumentError(f"{file.path}: damaged: {where}; save the cache again")
    return rows


def _sums(rows: Array) -> Array:
    """Sums of rows [.., kv_heads, width], uint64 [..]: any element that changes, changes its row's."""
    words = rows.view(np.uint8).reshape(*rows.shape[:-2], -1).view(np.uint64)
    return words @ (np.arange(words.shape[-1], dtype=np.uint64) * _ODD * np.uint64(2) + np.uint64(1))


@contextlib.contextmanager
def _claimed(directory: Path) -> Iterator[None]:
    """No other job saves there meanwhile: it would remove what does not belong to its own cache."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise BackendError(f"{directory}: cannot be made ({error.strerror}); name another place") from None
    try:
        with contextlib.suppress(OSError):  # where the file system knows no locks, there is none
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ArgumentError(
                    f"{directory}: another job is saving a cache there; wait for its end or name another one"
                ) from None
        yield
    finally:
        os.close(handle)


def _sync(directory: Path) -> None:
    """Names, too, are on the disk when this returns."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def as_json(about: dict[str, Any]) -> str:
    """What a user says of a cache, as it is written. Raises `ArgumentError`."""
    try:
        return msgspec.json.encode(about, order="sorted").decode()
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"about: cannot be written as JSON ({error})") from None


def _digest(index: Index) -> str:
    return hashlib.sha256(msgspec.json.encode(index)).hexdigest()
