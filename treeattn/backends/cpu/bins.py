"""Attention by the definition, and the merge, of the records of `treeattn.bins` on the processor."""

from __future__ import annotations

import numpy as np

from treeattn import bins
from treeattn.attention.mask_tables import MaskTables
from treeattn.backends.cpu.blocked import Sequence, wide
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
        query = wide(q[b, i, h], np.float32) * factor
        valid = k.shape[1] if lengths is None else int(lengths[b])
        tokens, stands = (np.arange(valid), None) if tables is None else tables.seen(b, i)
        keys, values = (
            wide(x[:, h // group], np.float32) for x in Sequence(k, v, b, block_table).rows(tokens)
        )
        softcap, penalty = 0.0, None
        if tables is not None:
            softcap = tables.rules.softcap or 0.0
            if stands is not None:
                penalty = np.asarray(tables.rules.alibi)[h] * (tables.q_positions[b, i] - stands)
        records[b, h, i] = bins.record(
            *(query, keys, values),
            1.0 if v_scale is None else float(v_scale[h // group]),
            softcap=softcap,
            penalty=penalty,
            blocks=tokens // bins.BLOCK if whole_blocks else None,
        )


class BinsOperator(MergeOperator):
    """How these records merge: a `collectives.runtime.operator.Operator`, associative to the bit."""

    _merge, _kind, _by_numpy = "merge_bins", 1, staticmethod(bins.merge)
    #: Whatever the schedule.
    bits = "of the tokens"

    def __init__(self, v_dim: int) -> None:
        self.width, self._dim, self.dtype = 2 * v_dim + bins.EXTRA, v_dim, np.dtype(np.int64)
