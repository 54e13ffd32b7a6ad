"""Attention on the processor: compiled C kernels, or NumPy where there is no compiler.

`PlannedAttention`, `planned_finish` and `MergeOperator.planned_merge` check once and keep pointers, for a
decoder's step. Records are described in `treeattn.partial`.
"""

from treeattn.backends.cpu.attention import (
    MAX_THREADS,
    WAYS,
    PlannedAttention,
    fastest_way,
)
from treeattn.backends.cpu.bins import BinsOperator
from treeattn.backends.cpu.compile import compiled_kernels_problem
from treeattn.backends.cpu.device import PlannedStep
from treeattn.backends.cpu.multiply_rows import PlannedProduct
from treeattn.backends.cpu.records import (
    MergeOperator,
    planned_finish,
    planned_pack,
    planned_scale,
)

__all__ = [
    "MAX_THREADS",
    "WAYS",
    "BinsOperator",
    "MergeOperator",
    "PlannedAttention",
    "PlannedProduct",
    "PlannedStep",
    "compiled_kernels_problem",
    "fastest_way",
    "planned_finish",
    "planned_pack",
    "planned_scale",
]
