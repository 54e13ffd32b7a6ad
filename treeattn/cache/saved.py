"""Caches that last: written by the ranks of one job, read by those of another, whatever their number."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from treeattn import files
from treeattn.cache.index import NAME, Index, read_index
from treeattn.cache.parts import GLOB, UNFINISHED, read_rows, write_part
from treeattn.cache.placement import Plan, Reach
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.errors import ArgumentError, BackendError, TreeattnError
from treeattn.mpi.agreement import Agreement, collectively

if TYPE_CHECKING:
    from treeattn.cache.sharded import CacheLayer


def save(comm: Communicator, layers: Sequence[CacheLayer], directory: Path, about: dict[str, Any]) -> None:
    """As `ShardedCache.save`. Collective."""
    with contextlib.ExitStack() as claim:
        collectively(comm, lambda: None if comm.rank else claim.enter_context(_claimed(directory)))
        _save(comm, layers, directory, about)


def _save(comm: Communicator, layers: Sequence[CacheLayer], directory: Path, about: dict[str, Any]) -> None:
    plan, reach = layers[0]._plan, layers[0]._reach
    written: Path | None = None
    try:
        with Agreement(comm) as agreed:
            for number, layer in enumerate(layers):
                if not np.array_equal(layer.totals, reach.totals):
                    raise ArgumentError(
                        f"layer {number} holds {layer.totals.tolist()} tokens, the first one "
                        f"{reach.totals.tolist()}: a cache is saved when all layers have come as far"
                    )
            agreed.must_match = {"the tokens": reach.totals.tolist(), "about": as_json(about)}
            _make(directory)
            before = _parts(directory)
            agreed.share = part = write_part(directory, layers)
            written = None if part.file in before else directory / part.file
        index = Index(
            **_of_shape(plan),
            layers=len(layers),
            latent=plan.latent,
            layout=plan.placement.name,
            capacity=layers[0].capacity,
            totals=tuple(reach.totals.tolist()),
            parts=tuple(agreed.gathered),
            about=about,
        )
        collectively(comm, lambda: None if comm.rank else _publish(directory, index))
    except TreeattnError:
        if written is not None:
            written.unlink(missing_ok=True)
        raise


def agree(comm: Communicator, directory: Path) -> Index:
    """The index that all ranks read. Collective."""
    with Agreement(comm) as agreed:
        index = read_index(directory)
        agreed.must_match = {f"the index of {directory}": index.sha256}
    return index


def fill(comm: Communicator, layers: Sequence[CacheLayer], directory: Path, index: Index) -> None:
    """Read this rank's tokens into empty layers. Collective."""
    collectively(comm, lambda: read_layers(layers, directory, index))


def read_layers(layers: Sequence[CacheLayer], directory: Path, index: Index) -> None:
    """The same, by one rank. Raises `ArgumentError`."""
    plan, totals = layers[0]._plan, np.array(index.totals, np.int64)
    if plan.placement.limit is not None and totals.max() > plan.placement.limit:
        raise ArgumentError(
            f"{directory}: a sequence of {totals.max()} tokens exceeds the capacity of "
            f"{plan.placement.limit}: give a larger one"
        )
    reach = Reach(plan.placement, totals)
    for layer in layers:
        layer._reserve(reach)
    for part in index.parts:
        read_rows(directory, part, layers, reach)
    for layer in layers:
        layer._stand(reach)


def _publish(directory: Path, index: Index) -> None:
    """Let the index take the place of the one before, and remove what belongs to that."""
    for part in index.parts:
        path = directory / part.file
        if not path.is_file() or path.stat().st_size != part.bytes:
            raise ArgumentError(f"{path}: not there for rank 0: name a directory that all ranks share")
    _sync(directory)
    files.output_writer(directory / NAME)(index.encode())
    _sync(directory)
    kept = {part.file for part in index.parts}
    for path in itertools.chain.from_iterable(map(directory.glob, (GLOB, *UNFINISHED))):
        if path.name not in kept:
            with contextlib.suppress(OSError):
                path.unlink()


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BackendError(f"{directory}: cannot be made ({error.strerror}); name another place") from None


@contextlib.contextmanager
def _claimed(directory: Path) -> Iterator[None]:
    """No other job saves there meanwhile: it would remove what does not belong to its own cache."""
    _make(directory)
    handle = os.open(directory, os.O_RDONLY)
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


def _parts(directory: Path) -> set[str]:
    return {path.name for path in directory.glob(GLOB)}


def _sync(directory: Path) -> None:
    """Names, too, are on the disk when this returns."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _of_shape(plan: Plan) -> dict[str, Any]:
    shape = plan.shape
    names = "kv_heads", "head_dim", "v_dim", "k_scale", "v_scale"
    return {"dtype": shape.kv_dtype, **{name: getattr(shape, name) for name in names}}


def as_json(about: dict[str, Any]) -> str:
    """What a user says of a cache, as it is written. Raises `ArgumentError`."""
    try:
        return msgspec.json.encode(about, order="sorted").decode()
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"about: cannot be written as JSON ({error})") from None
