"""Averages over keys that are sharded across ranks: one reduction of records.

The tilted score of a key is ``scale q.k + zeta.v``. A record is the maximum of a rank's scores, the sum of
exp(score - maximum), and the same sum of features of the values: it merges as one of attention does, whatever
the features are. Ranks agree on what they compute in one exchange, which also carries what the features need
to know of all shards. The sums of a shard are float64, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from treeattn import partial
from treeattn.attention import arrays
from treeattn.attention.arguments import Rules, Shard, read_positions
from treeattn.attention.arrays import AnyArray
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.shape import as_tensor, query_dtype
from treeattn.backends import device as devices
from treeattn.collectives.runtime.communicator import Communicator, Given
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.mask_plan import DeclaredPositions, planned_positions
from treeattn.decoder.reducers import folding, plan_reducer
from treeattn.decoder.request import Reduction, Request
from treeattn.errors import ArgumentError, RestrictionError
from treeattn.mpi import communicators
from treeattn.mpi.communicators import Agreement, collectively
from treeattn.partial import Array

_BLOCK_BYTES = 1 << 25  # about what the arrays of a block of tokens may take

#: Of a batch row and its float64 values [kv_heads, tokens, v_dim]: what is averaged, [kv_heads, tokens, ..].
Features = Callable[[int, Array], Array]


class Options(TypedDict, total=False):
    """What every function takes besides its arrays, as `treeattn.decode` does."""

    comm: Communicator | None
    scheme: str | Schedule | Reduction
    scale: float | None
    lengths: ArrayLike
    rules: Rules | None
    q_positions: ArrayLike


class KeyAverage(NamedTuple):
    """Over the keys of all ranks, with weights exp(scale q.k + zeta.v); the same bits on every rank.

    mean: of the features, [batch, queries, heads, width]; 0 where there is no key. lse: [batch, heads,
    queries], the logarithm of the sum of the weights. summaries: of every rank's shard; features: what was
    made of them.
    """

    mean: Array
    lse: Array
    summaries: list[Any]
    features: Any


def average(
    name: str,
    features: Callable[[Sequence[Any]], Features],
    zeta: AnyArray | None,
    q: AnyArray,
    k: AnyArray | Shard,
    v: AnyArray | None,
    summary: Callable[[Array, Array, Array], object] = lambda *_: None,
    *,
    comm: Given = None,
    scheme: str | Schedule | Reduction | None = None,
    scale: float | None = None,
    lengths: ArrayLike | None = None,
    rules: Rules | None = None,
    q_positions: ArrayLike | None = None,
) -> KeyAverage:
    """Average features over all keys. Collective; arguments and errors as for `treeattn.energy.value`.

    name: of what is averaged, equal on all ranks. summary: of q, this rank's values and how many are valid,
    [batch]: what `features` is given of every rank; what it raises is raised on all ranks.
    """
    comm = communicators.intracomm(comm)
    with Agreement(comm, "energy") as agreed:
        how, selection = folding(scheme, "an energy is a sum over all keys on every rank", comm, "cpu")
        device = devices.find("cpu")
        shard = Shard.of(k, v, lengths).in_rows("an energy takes")
        for one, array in {"zeta": zeta, "q": q, "k": shard.k, "v": shard.v}.items():
            if array is not None and arrays.device_of(one, array) != "cpu":
                raise ArgumentError(
                    f"{one} lies on a GPU: energies are computed on the CPU, so move it there"
                )
        queries, held, shape, tokens = device.admit(q, shard, scale)
        keys: Any = held.k
        values: Any = held.v
        valid = np.full(shape.batch, tokens) if held.lengths is None else np.asarray(held.lengths)
        tilt = None if zeta is None else tensor("zeta", zeta, (*queries.shape[:3], shape.v_dim))
        if tilt is not None and tilt.dtype != queries.dtype:
            raise ArgumentError(f"zeta is {tilt.dtype}, expected {queries.dtype}, as q is")
        declared = DeclaredPositions(read_positions(shard.positions), tuple(valid.tolist()))
        at = None if q_positions is None else np.asarray(q_positions)
        seen = {} if at is None else {"q_positions": repr(at.tolist())}
        plain = _plain(rules, shape.heads)
        request = Request(shape, how, selection, scale, device, rules=plain, declared=declared, seen=seen)
        agreed.must_match = request.settings | {
            "zeta being there": zeta is not None,
            "what is computed": name,
        }
        agreed.share = declared, summary(queries, values, valid)
    # What each query sees of this shard, now that positions of all shards are known.
    everyone, summaries = map(list, zip(*agreed.gathered, strict=True))
    runs, last = (
        planned_positions(everyone, comm.rank, shape.queries) if request.asks_positions else (None, None)
    )
    tables = MaskTables(plain, shape.batch, shape.queries)
    collectively(comm, lambda: tables.update(runs, tokens, valid, last if at is None else at))
    # This rank's records, folded over all ranks, then divided.
    averaged, dtype = features(summaries), shape.record_dtype
    folded = records(queries, tilt, keys, values, request.logit_scale, tables.intervals, averaged, dtype)
    width = folded.shape[-1] - partial.EXTRA
    operator = device.merge_operator(width, dtype)
    with plan_reducer(comm, device, how, selection, operator, folded) as reducer:
        reducer()
    mean, lse = np.empty((*queries.shape[:3], width), dtype), np.empty(shape.lse_shape, dtype)
    partial.finish(folded, mean, lse)
    return KeyAverage(mean, lse, summaries, averaged)


def tensor(name: str, array: AnyArray, shape: tuple[int, ...]) -> Array:
    """An array in the memory of the host, of this shape, not copied. Raises `ArgumentError`."""
    view = devices.find("cpu").view(name, array)
    view = as_tensor(name, view, query_dtype(view))
    if view.shape != shape:
        raise ArgumentError(
            f"{name} has shape {list(view.shape)}, expected [batch, queries, heads, v_dim] = {list(shape)}"
        )
    return view


def _plain(rules: Rules | None, heads: int) -> Rules:
    """Rules that say which keys count and change no logit. Raises `RestrictionError`."""
    given = Rules.of(rules, heads)
    other = [name for name in given.names if name in ("softcap", "alibi", "sink_logits")]
    if other:
        raise RestrictionError(f"{', '.join(other)}: an energy is that of plain scores; leave it out")
    return given


@np.errstate(all="ignore")
def records(
    q: Array,
    zeta: Array | None,
    k: Array,
    v: Array,
    scale: float,
    intervals: Array,
    features: Features,
    dtype: DTypeLike,
) -> Array:
    """Records [batch, heads, queries, 2 + width] of this rank's keys; float32 or float64.

    q and zeta [batch, queries, heads, ..], k and v [batch, tokens, kv_heads, ..] of any floating type.
    intervals: of the tokens that each query sees, [batch, queries, (begin, end, begin, end)].
    """
    batch, queries, heads, _ = q.shape
    kv_heads = k.shape[2]
    width = features(0, np.empty((kv_heads, 0, v.shape[3]))).shape[-1]
    made = partial.identity((batch, heads, queries), width, np.float64)
    token_bytes = 8 * (2 * heads * queries + kv_heads * (3 * (k.shape[3] + v.shape[3]) + 2 * width))
    step = max(16, _BLOCK_BYTES // token_bytes)
    for row in range(batch):
        for interval in np.unique(intervals[row], axis=0):
            chosen = (intervals[row] == interval).all(axis=-1)
            asked = scale * _by_kv_head(q[row, chosen], kv_heads)
            if zeta is not None:
                asked = np.concatenate((asked, _by_kv_head(zeta[row, chosen], kv_heads)), axis=-1)
            folded = made[row][:, chosen]
            for begin, end in interval.reshape(2, 2).tolist():
                for start in range(begin, end, step):
                    tokens = slice(start, min(start + step, end))
                    keys, values = (
                        array[row, tokens].astype(np.float64).transpose(1, 0, 2) for array in (k, v)
                    )
                    tilted = keys if zeta is None else np.concatenate((keys, values), axis=-1)
                    block = _block(asked, tilted, features(row, values))
                    partial.merge(folded, block.reshape(folded.shape))
            made[row][:, chosen] = folded
    return made if dtype == np.float64 else _narrowed(made)


def _by_kv_head(rows: Array, kv_heads: int) -> Array:
    """[queries, heads, dim] as float64 [kv_heads, heads of the group * queries, dim]: as records lie."""
    return np.ascontiguousarray(rows.transpose(1, 0, 2), np.float64).reshape(kv_heads, -1, rows.shape[-1])


def _block(queries: Array, keys: Array, features: Array) -> Array:
    """Records [kv_heads, queries, 2 + width] over keys [kv_heads, tokens, dim], at least one."""
    scores = queries @ keys.transpose(0, 2, 1)
    maximum = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(maximum == -np.inf, 0, maximum))
    denominator = weights.sum(axis=-1, keepdims=True)
    maximum = np.where(np.isnan(denominator), np.nan, maximum)
    return np.concatenate((maximum, denominator, weights @ features), axis=-1)


def _narrowed(wide: Array) -> Array:
    """Records of float32: the rounding of a maximum is made good in what was summed relative to it."""
    maximum = wide[..., :1]
    rounded = maximum.astype(np.float32)
    sums = wide[..., 1:] * np.exp(np.where(np.isfinite(rounded), maximum - rounded, 0))
    return np.concatenate((rounded, sums), axis=-1, dtype=np.float32, casting="same_kind")
