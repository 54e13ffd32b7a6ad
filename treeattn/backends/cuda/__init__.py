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
    from treeattn.backends.cuda.attention import PlannedAttention
    from treeattn.backends.cuda.pull import PlannedPull
    from treeattn.backends.cuda.records import MergeOperator, planned_finish, planned_pack, planned_scale
    from treeattn.backends.cuda.runtime import Runtime

__all__ = [
    "MergeOperator",
    "PlannedAttention",
    "PlannedPull",
    "Runtime",
    "planned_finish",
    "planned_pack",
    "planned_scale",
]
_MODULES = {"PlannedAttention": "attention", "PlannedPull": "pull", "Runtime": "runtime"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'records')}"), name)
    return value
