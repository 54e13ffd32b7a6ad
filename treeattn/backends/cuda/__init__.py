"""Attention on an NVIDIA GPU, by the kernels in ``kernels/cuda``.

The same names as in `treeattn.backends.cpu`: `PlannedAttention`, `planned_finish` and
`MergeOperator.planned_merge` check once and only launch afterwards, without allocating, so that a CUDA graph
can capture them. Work goes to CuPy's current stream and is not waited for. Records are float32, as in
`treeattn.partial`; merge and finish give its bits.

A GPU is reached through a `Runtime`: CuPy's where a GPU is, any other that behaves like it in tests.

A name is loaded when it is first asked for: to count GPUs, or to reach one, needs no kernel's planning.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_MODULES = {
    "check_rows": "arguments",
    "PlannedAttention": "attention",
    "most_queries": "attention",
    "BlockTables": "block_table",
    "PlannedProduct": "multiply_rows",
    "PlannedPull": "pull",
    "MergeOperator": "records",
    "planned_finish": "records",
    "planned_pack": "records",
    "planned_scale": "records",
    "Runtime": "runtime",
    "default_runtime": "runtime",
    "MAX_SPLITS": "splits",
    "TENSOR_CORES_FROM_ROWS": "variants",
    "check_head_dim": "variants",
    "kernel_head_dim": "variants",
}

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


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
