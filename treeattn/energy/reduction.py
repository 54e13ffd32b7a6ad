"""One reduction of records: from what every rank was given to averages over all keys.

Ranks agree on what they compute in one exchange, which also carries what each shares with the others
(positions, sums of values); then records are folded by any scheme that leaves them whole on every rank.

A rank's records are of its tilted scores, in float64, block by block. The tilted score of a key is
``scale q.k + zeta.v``. A record is their maximum, the sum of exp(score - maximum), and the same sum of some
features of the values: a merge of records is one of all three, whatever the features are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from treeattn import partial
from treeattn.attention import arrays
from treeattn.attention.arrays import AnyArray
from treeattn.attention.mask import Rules
from treeattn.attention.shape import Shape, as_tensor, dtype_name
from treeattn.attention.shard import Shard, read_positions
from treeattn.backends import device as devices
from treeattn.collectives.runtime.communicator import Communicator, Given
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.mask_plan import DeclaredPositions, MaskPlan
from treeattn.decoder.plan import folding, plan_reducer
from treeattn.decoder.request import Reduction, Request
from treeattn.errors import ArgumentError, RestrictionError
from treeattn.mpi import communicators
from treeattn.mpi.agreement import Agreement, collectively
from treeattn.partial import Array


class Options(TypedDict, total=False):
    """What every verb takes besides its arrays, as `treeattn.decode` does."""

    comm: Communicator | None
    scheme: str | Schedule | Reduction
    scale: float | None
    lengths: ArrayLike
    rules: Rules | None
    q_positions: ArrayLike


class Statistic:
    """What is averaged over the keys: nothing, where the sum of the weights is all that is wanted.

    name: equal on all ranks. `share`: what this rank lets the others know, of its values [batch, tokens,
    kv_heads, head_dim] and how many are valid, [batch]; an error ends it on all ranks. `features`: from the
    width of a value and what all ranks shared.
    """

    name = "value"

    def share(self, q: Array, v: Array, lengths: Array) -> object:
        return None

    def features(self, v_dim: int, shared: Sequence[Any]) -> Features:
        return Features(0, lambda row, values: values[..., :0])


class Averages(NamedTuple):
    """Over all keys of all ranks, with the weights exp(scale q.k + zeta.v); the same bits on every rank.

    mean: of the features, [batch, queries, heads, width]; 0 where nothing was seen. lse: [batch, heads,
    queries], the logarithm of the sum of the weights. shape: of q and k.
    """

    mean: Array
    lse: Array
    shape: Shape


def reduce(
    statistic: Statistic,
    zeta: AnyArray | None,
    q: AnyArray,
    k: AnyArray | Shard,
    v: AnyArray | None,
    comm: Given = None,
    scheme: str | Schedule | Reduction | None = None,
    scale: float | None = None,
    lengths: ArrayLike | None = None,
    rules: Rules | None = None,
    q_positions: ArrayLike | None = None,
) -> Averages:
    """Average a statistic over all keys. Collective; arguments and errors as for `treeattn.energy.value`."""
    comm = communicators.intracomm(comm)
    with Agreement(comm) as agreed:
        how, selection = folding(scheme, "an energy is a sum over all keys on every rank", comm, "cpu")
        shard = Shard.of(k, v, lengths).in_rows("an energy takes")
        queries, values = tensor("q", q), tensor("v", shard.v, shard.dtype)
        keys = tensor("k", shard.k, shard.dtype)
        shape, valid, tilt = _checked(queries, keys, values, zeta, shard.lengths)
        declared = DeclaredPositions(read_positions(shard.positions), tuple(valid.tolist()))
        device, plain = devices.find("cpu"), _plain(rules, shape.heads)
        request = Request(shape, how, selection, scale, device, rules=plain, declared=declared)
        stands = None if q_positions is None else np.asarray(q_positions)
        agreed.must_match = request.settings | {
            "zeta being there": zeta is not None,
            "q_positions": None if stands is None else stands.tolist(),
            "what is computed": statistic.name,
        }
        agreed.share = declared, statistic.share(queries, values, valid)
    places, shared = zip(*agreed.gathered, strict=True)
    intervals = _intervals(request, places, comm, keys.shape[1], valid, stands)
    inputs = EnergyInputs(queries, tilt, keys, values, request.logit_scale, intervals)
    return _folded(request, comm, inputs, statistic.features(values.shape[3], shared))


def tensor(name: str, array: AnyArray | None, dtype: str | None = None) -> Array:
    """An array of four axes in the memory of the host, not copied. Raises `ArgumentError`."""
    if arrays.device_of(name, array) != "cpu":
        raise ArgumentError(f"{name} lies on a GPU: energies are computed on the CPU, so move it there")
    array = arrays.on_host(name, array)
    bits = array.dtype == np.uint16 and name in ("q", "z", "zeta")
    return as_tensor(name, array, "bfloat16" if bits else dtype)


def _checked(
    q: Array, k: Array, v: Array, zeta: AnyArray | None, lengths: ArrayLike | None
) -> tuple[Shape, Array, Array | None]:
    """The shape of a step, how many tokens are valid [batch], and zeta. Raises `ArgumentError`."""
    shape = Shape(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3], dtype_name(q))
    shape.check_query(q)
    shape.check_cache(k, v)
    tilt = None if zeta is None else tensor("zeta", zeta)
    if tilt is not None and (tilt.shape != (*q.shape[:3], v.shape[3]) or tilt.dtype != q.dtype):
        raise ArgumentError(
            f"zeta is {tilt.dtype} {list(tilt.shape)}, expected {q.dtype} {list(q.shape)}, as q is"
        )
    lengths = np.full(shape.batch, k.shape[1]) if lengths is None else lengths
    return shape, shape.check_lengths(lengths, k.shape[1]), tilt


def _plain(rules: Rules | None, heads: int) -> Rules:
    """Rules that say which keys count and change no logit. Raises `RestrictionError`."""
    given = Rules.of(rules, heads)
    other = [name for name in given.names if name in ("softcap", "alibi", "sink_logits")]
    if other:
        raise RestrictionError(f"{', '.join(other)}: an energy is that of plain scores; leave it out")
    return given


def _intervals(
    request: Request,
    places: Sequence[DeclaredPositions],
    comm: Communicator,
    tokens: int,
    lengths: Array,
    stands: Array | None,
) -> NDArray[np.int64]:
    """The tokens of this shard that each query sees, [batch, queries, 4]. Collective."""
    mask = MaskPlan(request.rules, request.shape)
    if request.asks_positions:
        mask.agree(places, comm.rank)

    def seen() -> NDArray[np.int64]:
        tables = mask.tables()
        mask.update(tables, tokens, lengths, stands)
        return tables.intervals

    return collectively(comm, seen) if request.asks_positions else seen()


def _folded(request: Request, comm: Communicator, inputs: EnergyInputs, features: Features) -> Averages:
    shape, dtype = request.shape, request.shape.record_dtype
    folded = np.empty((*shape.lse_shape, features.width + partial.EXTRA), dtype)
    operator = request.device.merge_operator(features.width, dtype)
    with plan_reducer(comm, request.device, request.how, request.scheme, operator, folded) as reducer:
        folded[...] = records(inputs, features, dtype)
        reducer()
    mean, lse = np.empty((*shape.q_shape[:3], features.width), dtype), np.empty(shape.lse_shape, dtype)
    partial.finish(folded, mean, lse)
    return Averages(mean, lse, shape)


_BYTES = 1 << 25  # about what the arrays of a block may take


class Features(NamedTuple):
    """What the numerators sum: `of` a batch row and its float64 values [kv_heads, tokens, head_dim] gives
    numbers [kv_heads, tokens, width]."""

    width: int
    of: Callable[[int, Array], Array]


class EnergyInputs(NamedTuple):
    """The energy's arguments on this rank: q and zeta (None is 0) [batch, queries, heads, head_dim], k and v
    [batch, tokens, kv_heads, head_dim], and the tokens that each query sees, [batch, queries, (begin, end,
    begin, end)]."""

    q: Array
    zeta: Array | None
    k: Array
    v: Array
    scale: float
    intervals: Array


def records(inputs: EnergyInputs, features: Features, dtype: DTypeLike) -> Array:
    """Records [batch, heads, queries, 2 + width] of the tokens that each query sees; float32 or float64."""
    batch, queries, heads = inputs.q.shape[:3]
    made = partial.identity((batch, heads, queries), features.width, np.float64)
    for row in range(batch):
        for interval in np.unique(inputs.intervals[row], axis=0):
            alike = (inputs.intervals[row] == interval).all(axis=-1)
            folded = made[row][:, alike]
            for tokens in _blocks(inputs, interval, int(alike.sum()), features.width):
                partial.merge(folded, _block(inputs, row, alike, tokens, features))
            made[row][:, alike] = folded
    return made if dtype == np.float64 else _narrowed(made)


def _blocks(inputs: EnergyInputs, interval: Array, queries: int, width: int) -> Iterator[slice]:
    """The tokens of an interval, few enough at once for their scores and features."""
    kv_heads, head_dim = inputs.k.shape[2:]
    each = 8 * (2 * inputs.q.shape[2] * queries + kv_heads * (2 * head_dim + 2 * width))
    step = max(16, _BYTES // each)
    for begin, end in interval.reshape(2, 2).tolist():
        for start in range(begin, end, step):
            yield slice(start, min(start + step, end))


def _block(inputs: EnergyInputs, row: int, queries: Array, tokens: slice, features: Features) -> Array:
    """Records [heads, queries, 2 + width] over a few tokens, at least one, of one batch row."""
    keys, values = (_wide(array[row, tokens]).transpose(1, 0, 2) for array in (inputs.k, inputs.v))
    with np.errstate(all="ignore"):
        scores = (_by_kv_head(inputs.q[row, queries], keys) * inputs.scale) @ keys.transpose(0, 2, 1)
        if inputs.zeta is not None:
            scores += _by_kv_head(inputs.zeta[row, queries], values) @ values.transpose(0, 2, 1)
        maximum = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - np.where(maximum == -np.inf, 0, maximum))
        denominator = weights.sum(axis=-1, keepdims=True)
        numerator = weights @ features.of(row, values)
    maximum = np.where(np.isnan(denominator), np.nan, maximum)
    joined = np.concatenate((maximum, denominator, numerator), axis=-1)
    return joined.reshape(inputs.q.shape[2], -1, features.width + partial.EXTRA)


def _by_kv_head(rows: Array, keys: Array) -> Array:
    """[queries, heads, head_dim] as [kv_heads, heads of the group * queries, head_dim]: as records lie."""
    return _wide(rows).transpose(1, 0, 2).reshape(keys.shape[0], -1, rows.shape[-1])


def _wide(values: Array) -> Array:
    return np.ascontiguousarray(values, np.float64)


def _narrowed(wide: Array) -> Array:
    """Records of float32: the rounding of a maximum is made good in what was summed relative to it."""
    maximum = wide[..., :1]
    with np.errstate(all="ignore"):
        rounded = maximum.astype(np.float32)
        sums = wide[..., 1:] * np.exp(np.where(np.isfinite(rounded), maximum - rounded, 0))
        return np.concatenate((rounded, sums), axis=-1, dtype=np.float32, casting="same_kind")
