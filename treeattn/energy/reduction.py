"""One reduction: from what every rank was given to averages over all keys, agreed once.

Ranks agree on what they ask in one exchange, which also carries what each tells the others (positions, sums
of values); then records are folded by any scheme that leaves them whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from treeattn import comm as comm_
from treeattn import partial
from treeattn.attention import arrays
from treeattn.attention.shape import Shape, as_tensor, dtype_name
from treeattn.attention.visibility import Visibility
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import device as devices
from treeattn.decoder.plan import folding, plan_reducer
from treeattn.decoder.request import Request
from treeattn.decoder.sight import Sight, Stated, Told, agree
from treeattn.energy.shard import Features, Shard, records
from treeattn.errors import ArgumentError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Averages", "Options", "Statistic", "reduce", "tensor"]

_BECAUSE = "an energy is a sum over all keys on every rank"


@dataclass(frozen=True, slots=True)
class Options:
    """What all verbs take besides their arrays, as `treeattn.decode` does."""

    comm: Intracomm | None
    scheme: str | Schedule
    scale: float | None
    lengths: Any
    causal: bool
    positions: Any
    q_positions: Any
    dtype: str | None


class Statistic(Protocol):
    """What is averaged over the keys."""

    @property
    def name(self) -> str:
        """Equal on all ranks."""

    def tell(self, v: Any, lengths: Any) -> Any:
        """What this rank tells the others: from its values and how many are valid, [batch]. May raise."""

    def features(self, v_dim: int, told: Sequence[Any]) -> Features:
        """From the length of a value and what all ranks told."""


class Averages(NamedTuple):
    """Over all keys of all ranks, with the weights exp(scale q.k + zeta.v); the same bits on every rank.

    mean: of the features, [batch, queries, heads, width]; 0 where nothing was seen. lse: [batch, heads,
    queries], the logarithm of the sum of the weights. shape: of q and k.
    """

    mean: Any
    lse: Any
    shape: Shape


def reduce(zeta: Any, q: Any, k: Any, v: Any, options: Options, statistic: Statistic) -> Averages:
    """Collective. Raises, on every rank alike, `ArgumentError`, `ScheduleError`, `RestrictionError` or
    `BackendError`."""
    comm = comm_.intracomm(options.comm)
    with comm_.Agreement(comm) as agreed:
        asked = _ask(zeta, q, k, v, options)
        agreed.equal = asked.settings | {"what is computed": statistic.name}
        agreed.told = asked.request.stated.told(), statistic.tell(asked.v, asked.lengths)
    places, told = zip(*agreed.everywhere, strict=True)
    features = statistic.features(asked.v.shape[3], told)
    intervals = _intervals(asked, places, comm)
    shape = asked.request.shape
    folded = np.empty((*shape.lse_shape, features.width + partial.EXTRA), shape.record_dtype)
    operator = asked.request.device.merge_operator(features.width, shape.record_dtype)
    with plan_reducer(comm, asked.request.device, None, asked.request.scheme, operator, folded) as reducer:
        shard = Shard(asked.q, asked.zeta, asked.k, asked.v, asked.request.logit_scale, intervals)
        folded[...] = records(shard, features, shape.record_dtype)
        reducer()
    mean = np.empty((*shape.q_shape[:3], features.width), shape.record_dtype)
    lse = np.empty(shape.lse_shape, shape.record_dtype)
    partial.finish(folded, mean, lse)
    return Averages(mean, lse, shape)


class _Asked(NamedTuple):
    """What one rank asks, checked on its own."""

    request: Request
    q: Any
    zeta: Any
    k: Any
    v: Any
    lengths: Any
    q_positions: Any

    @property
    def settings(self) -> dict[str, object]:
        """What must be equal on all ranks."""
        return self.request.settings | {
            "zeta being there": self.zeta is not None,
            "q_positions": None if self.q_positions is None else self.q_positions.tolist(),
        }


def _ask(zeta: Any, q: Any, k: Any, v: Any, options: Options) -> _Asked:
    q, k, v = (tensor(name, array, options.dtype) for name, array in zip("qkv", (q, k, v), strict=True))
    batch, queries, heads, head_dim = q.shape
    shape = Shape(batch, queries, heads, k.shape[2], head_dim, dtype_name(q))
    shape.check_query(q)
    shape.check_cache(k, v)
    if zeta is not None:
        zeta = tensor("zeta", zeta, options.dtype)
        if zeta.shape != (*q.shape[:3], v.shape[3]) or zeta.dtype != q.dtype:
            raise ArgumentError(
                f"zeta is {zeta.dtype} {list(zeta.shape)}, expected {q.dtype} {list(q.shape)}, as q is"
            )
    lengths = np.full(shape.batch, k.shape[1]) if options.lengths is None else options.lengths
    lengths = shape.check_lengths(lengths, k.shape[1])
    request = Request(
        *(shape, folding(options.scheme, _BECAUSE), options.scale, devices.find("cpu"), None, "replicated"),
        rules=Visibility.of(heads, causal=options.causal),
        stated=Stated(options.positions, tuple(lengths.tolist())),
    )
    q_positions = None if options.q_positions is None else np.asarray(options.q_positions)
    return _Asked(request, q, zeta, k, v, lengths, q_positions)


def tensor(name: str, array: Any, dtype: str | None) -> Any:
    """An array of four axes in the memory of the host, not copied. Raises `ArgumentError`."""
    if arrays.device_of(name, array) != "cpu":
        raise ArgumentError(f"{name} lies on a GPU: energies are computed on the processor, so move it there")
    return as_tensor(name, arrays.on_host(name, array), dtype)


def _intervals(asked: _Asked, places: Sequence[Told], comm: Intracomm) -> Any:
    """The tokens of this shard that each query sees, [batch, queries, 4]. Collective.

    places: what ranks told of their tokens.
    """
    request = asked.request
    sight = Sight(request.rules, request.shape)
    if request.asks_positions:
        sight.runs, ends = agree(request.stated.layout, places, comm.rank)
        sight.stand(ends)

    def seen() -> Any:
        visible = sight.tables()
        sight.look(visible, asked.k.shape[1], asked.lengths, asked.q_positions, None, None, None)
        return visible.intervals

    return comm_.together(comm, seen) if request.asks_positions else seen()
