"""The verbs of a backend, planned for one call."""

from __future__ import annotations


def attend(backend, q, k, v, records, *, lengths=None, block_table=None, **plan):
    backend.PlannedAttention(records, **plan)(q, k, v, lengths, block_table)


def merge(backend, into, other, **place):
    operator = backend.MergeOperator(into.shape[-1] - 2, into.dtype, **place)
    operator.planned_merge(into, other)()


def finish(backend, records, out, lse, **place):
    backend.planned_finish(records, out, lse, **place)()
