"""Attention on an NVIDIA GPU, by the kernels in ``kernels/cuda``.

The same names as in `treeattn.backends.cpu`: `PlannedAttention`, `planned_finish` and
`MergeOperator.planned_merge` check once and only launch afterwards, without allocating, so that a CUDA graph
can capture them. Work goes to CuPy's current stream and is not waited for. Records are float32, as in
`treeattn.partial`; merge and finish give its bits.

A GPU is reached through a `Runtime`: CuPy's where a GPU is, any other that behaves like it in tests.
"""

from treeattn.backends.cuda.arguments import check_rows
from treeattn.backends.cuda.attention import PlannedAttention, most_queries
from treeattn.backends.cuda.block_table import BlockTables
from treeattn.backends.cuda.multiply_rows import PlannedProduct
from treeattn.backends.cuda.pull import PlannedPull
from treeattn.backends.cuda.records import (
    MergeOperator,
    planned_finish,
    planned_pack,
    planned_scale,
)
from treeattn.backends.cuda.runtime import Runtime, default_runtime
from treeattn.backends.cuda.splits import MAX_SPLITS
from treeattn.backends.cuda.variants import TENSOR_CORES_FROM_ROWS, check_head_dim, kernel_head_dim

__all__ = [
    "MAX_SPLITS",
    "TENSOR_CORES_FROM_ROWS",
    "BlockTables",
    "MergeOperator",
    "PlannedAttention",
    "PlannedProduct",
    "PlannedPull",
    "Runtime",
    "check_head_dim",
    "check_rows",
    "default_runtime",
    "kernel_head_dim",
    "most_queries",
    "planned_finish",
    "planned_pack",
    "planned_scale",
]
