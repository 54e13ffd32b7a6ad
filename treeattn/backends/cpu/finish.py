"""Records into results on the processor: the compiled kernel, or NumPy; the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from treeattn import partial
from treeattn.backends.cpu import arguments, kernels
from treeattn.backends.cpu.arguments import Array

__all__ = ["finish", "planned_finish"]


def finish(records: Array, out: Array, lse: Array) -> None:
    """Turn records into attention output, as `treeattn.partial.finish` defines it, to the bit.

    Args:
        records: [batch, heads, queries, head_dim + 2].
        out: written, [batch, queries, heads, head_dim].
        lse: written, [batch, heads, queries]. All C-contiguous and of one type.

    Raises:
        ArgumentError: shapes, types or strides that do not fit.
    """
    planned_finish(records, out, lse)()


def planned_finish(records: Array, out: Array, lse: Array) -> Callable[[], object]:
    """`finish` for arrays that never move: a call without arguments and without checks."""
    arguments.check_records(records)
    batch, heads, queries, width = records.shape
    arguments.check_output("out", out, (batch, queries, heads, width - partial.EXTRA), records)
    arguments.check_output("lse", lse, (batch, heads, queries), records)
    compiled = kernels.loaded()[0]
    if compiled is None or records.dtype != np.float32:
        return functools.partial(partial.finish, records, out, lse)
    return arguments.planned(compiled.finish, records, out, lse, *records.shape)
