"""The verbs of a backend, planned for one call."""

import numpy as np


def attend(backend, q, k, v, records, *, lengths=None, block_table=None, **plan):
    backend.PlannedAttention(records, **plan)(q, k, v, lengths, block_table)


def merge(backend, into, other, **place):
    operator = backend.MergeOperator(into.shape[-1] - 2, into.dtype, **place)
    operator.planned_merge(into, other)()


def finish(backend, records, out, lse, **place):
    backend.planned_finish(records, out, lse, **place)()


def records_of(backend, q, k, v, **given):
    """Records of q's precision, in which nothing is left of what was there before."""
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    records = np.full((*np.array(q.shape)[[0, 2, 1]], v.shape[3] + 2), 77, dtype)
    attend(backend, q, k, v, records, **given)
    return records


def finished(backend, records):
    """out and lse."""
    batch, heads, queries, width = records.shape
    out = np.full((batch, queries, heads, width - 2), 77, records.dtype)
    lse = np.full(records.shape[:3], 77, records.dtype)
    finish(backend, records, out, lse)
    return out, lse


def attention(backend, q, k, v, **given):
    """out and lse of one attention."""
    return finished(backend, records_of(backend, q, k, v, **given))
