"""Attention by the definition, and the merge, of the records of `treeattn.bins` on the processor."""

from __future__ import annotations

import numpy as np

from treeattn import bins
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.pages import rows_of
from treeattn.backends.cpu.records import MergeOperator
from treeattn.partial import Array


def attend(
    q: Array,
    k: Array,
    v: Array,
    records: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    *,
    scale: float,
    lengths: Array | None = None,
    tables: MaskTables | None = None,
    block_table: Array | None = None,
    whole_blocks: bool = False,
) -> None:
    """Write the records [batch, heads, queries, 2 v_dim + 3] of what each query sees, by the definition, one
    by one. Arguments as of `blocked.partial_attention`."""
    group = q.shape[2] // k.shape[2]
    for b, h, i in np.ndindex(records.shape[:3]):
        factor = np.float32(scale) * (np.float32(1) if k_scale is None else k_scale[h // group])
        query = _float32(q[b, i, h]) * factor
        tokens, positions = _seen(tables, b, i, k.shape[1] if lengths is None else int(lengths[b]))
        at = (b, tokens)
        keys, values = (
            x[at][:, h // group] if block_table is None else rows_of(x, block_table[b], tokens)[:, h // group]
            for x in (k, v)
        )
        softcap, penalty = 0.0, None
        if tables is not None:
            softcap = tables.rules.softcap or 0.0
            if positions is not None:
                time = np.float64(tables.q_positions[b, i])
                penalty = np.asarray(tables.rules.alibi)[h] * (time - positions)
        records[b, h, i] = bins.record(
            *(query, _float32(keys), _float32(values)),
            1.0 if v_scale is None else float(v_scale[h // group]),
            softcap=softcap,
            penalty=penalty,
            blocks=tokens // bins.BLOCK if whole_blocks else None,
        )


def _seen(tables: MaskTables | None, b: int, i: int, tokens: int) -> tuple[Array, Array | None]:
    """The tokens that a query sees, and where they stand, where somebody asks."""
    if tables is None:
        return np.arange(tokens), None
    ends = tables.intervals[b, i]
    drafts = np.flatnonzero(tables.sees_draft(b, i))
    context = np.concatenate([np.arange(*ends[:2]), np.arange(*ends[2:])])
    seen = np.concatenate([context, tables.draft_begins[b] + drafts]).astype(np.int64)
    if tables.rules.alibi is None:
        return seen, None
    pieces = [(int(ends[at]), int(ends[at + 1])) for at in (0, 2) if ends[at] < ends[at + 1]]
    stands = [tables.runs.positions(*piece) for piece in pieces]
    return seen, np.concatenate([*stands, tables.draft_positions[b, drafts]]).astype(np.float64)


def _float32(values: Array) -> Array:
    if values.dtype == np.uint16:  # the bits of bfloat16
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


class BinsOperator(MergeOperator):
    """How these records merge: a `collectives.runtime.operator.Operator`, associative to the bit."""

    _merge, _kind, _by_numpy = "merge_bins", 1, staticmethod(bins.merge)
    #: Whatever the schedule.
    bits = "of the tokens"

    def __init__(self, v_dim: int) -> None:
        self.width, self._dim, self.dtype = 2 * v_dim + bins.EXTRA, v_dim, np.dtype(np.int64)
