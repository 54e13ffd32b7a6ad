"""What is decoded in a measurement: random inputs of any length, and their float64 reference.

Each rank makes its own shard and nothing else. Shards repeat a period of random tokens: the kernels do the
same work for it, and since a token that occurs n times counts n times in denominator and numerator, the
float64 reference of any length costs no more than that of one period.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treeattn import reference
from treeattn.attention.shape import DTYPES
from treeattn.backends import device as devices
from treeattn.backends.device import Device
from treeattn.errors import ArgumentError
from treeattn.mpi.communicators import Agreement, MpiCommunicator, collectively
from treeattn.partial import Array
from treeattn.shards import Layout
from treeattn.study import environment
from treeattn.study.compare.rows import Key
from treeattn.study.compare.steps import shape_of

#: Tokens of a shard that differ from each other.
PERIOD = 2048
_SEED = 0


class Inputs(NamedTuple):
    """Inputs of this rank, on its device, and on rank 0 what must come out: (out, lse), bounds of "exact"."""

    device: Device
    q: Array | None
    k: Array | None
    v: Array | None
    records: Array | None
    expected: tuple[Array, Array] | None
    bounds: tuple[float, float] | None


def check_room(comm: MpiCommunicator, key: Key, machines: Sequence[int]) -> None:
    """Raise `ArgumentError` on every rank if a machine has less memory free than its ranks' inputs take.

    Asking for the memory would not tell: the system promises it, and ends the process that uses it.
    Collective; machines: of each rank, its machine. Emulated nodes share the memory of one.
    """
    free = environment.free_memory()
    needed = comm.allgather(_input_bytes(comm, key))
    here = [size for size, machine in zip(needed, machines, strict=True) if machine == machines[comm.rank]]
    with Agreement(comm):
        if free is not None and sum(here) > free:
            raise ArgumentError(
                f"the inputs of {len(here)} ranks take {sum(here) / 1e9:,.1f} GB, their machine has "
                f"{free / 1e9:,.1f} GB free: choose shorter --seq-len, a smaller --batch, fewer queries or "
                "heads"
            )


def _input_bytes(comm: MpiCommunicator, key: Key) -> int:
    """Bytes of this rank: records with their float64 copies, keys and values."""
    records = 3 * 8 * key.batch * key.queries * key.heads * (key.head_dim + 2)
    if key.what == "reduce":
        return records
    (run,) = Layout("contiguous").runs(key.tokens, comm.rank, comm.size)
    elements: int = 2 * key.batch * (run.stop - run.start) * key.kv_heads * key.head_dim
    return records + elements * int(DTYPES[key.dtype].itemsize)


def decode_inputs(comm: MpiCommunicator, key: Key) -> Inputs:
    """A query, equal on all ranks, and this rank's contiguous shard. Collective."""
    shape = shape_of(key)
    dtype = DTYPES[key.dtype]
    q = np.random.default_rng(_SEED).standard_normal(shape.q_shape).astype(dtype)
    (run,) = Layout("contiguous").runs(key.tokens, comm.rank, comm.size)
    tokens = run.stop - run.start
    draw = np.random.default_rng([_SEED, comm.rank])
    period = (key.batch, min(tokens, PERIOD), key.kv_heads, key.head_dim)
    k, v = (draw.standard_normal(period, np.float32).astype(dtype) for _ in "kv")
    partials = comm.gather(_repeated_partials(q, k, v, tokens, shape.logit_scale(None)), root=0)
    device = devices.find(key.device)

    def placed() -> list[Array]:
        shards = (np.take(array, np.arange(tokens) % PERIOD, axis=1) for array in (k, v))
        return [device.from_host(array) for array in (q, *shards)]

    q, k, v = collectively(comm, placed)
    return Inputs(device, q, k, v, None, *_judged(partials, device.rounds_weights(shape)))


def _repeated_partials(q: Array, k: Array, v: Array, tokens: int, scale: float) -> list[reference.Partial]:
    """Float64 partials of the period as often as it occurs, and of what is left over."""
    whole, rest = divmod(tokens, max(k.shape[1], 1))
    once = reference.partial(q, k, v, scale=scale)
    many = once._replace(denominator=whole * once.denominator, numerator=whole * once.numerator)
    return [many, reference.partial(q, k[:, :rest], v[:, :rest], scale=scale)]


def reduce_inputs(comm: MpiCommunicator, key: Key) -> Inputs:
    """This rank's random records, as a shard of some hundred tokens might give. Collective."""
    shape = shape_of(key)
    draw = np.random.default_rng([_SEED, comm.rank])
    records = np.empty((*shape.lse_shape, key.head_dim + 2), shape.record_dtype)
    records[..., 0] = draw.normal(3.0, 1.0, shape.lse_shape)
    records[..., 1] = draw.uniform(1.0, 300.0, shape.lse_shape)
    records[..., 2:] = records[..., 1:2] * draw.standard_normal((*shape.lse_shape, key.head_dim)) / 4
    exact = records.astype(np.float64)
    largest = float(np.abs(exact[..., 2:] / exact[..., 1:2]).max())
    mine = reference.Partial(exact[..., 0], exact[..., 1], exact[..., 2:], 0.0, largest)
    gathered = comm.gather([mine], root=0)
    device = devices.find(key.device)
    given = collectively(comm, lambda: device.from_host(records))
    return Inputs(device, None, None, None, given, *_judged(gathered))


def _judged(
    gathered: list[list[reference.Partial]] | None, rounded: bool = False
) -> tuple[tuple[Array, Array] | None, tuple[float, float] | None]:
    """(expected, bounds) on rank 0, from the float64 partials of all ranks. rounded: as for
    `reference.error_bounds`."""
    if gathered is None:
        return None, None
    partials = [partial for of_rank in gathered for partial in of_rank]
    return reference.combine(partials), reference.error_bounds(partials, rounded)
