"""Where ``reproducible=`` computes, and what does not go with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treeattn import bins
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.shape import Shape
from treeattn.backends import cpu
from treeattn.backends import device as devices
from treeattn.backends.cpu.device import Cpu
from treeattn.errors import ArgumentError, RestrictionError

if TYPE_CHECKING:
    from treeattn.decoder.request import Request

__all__ = ["REPRODUCIBLE", "ReproducibleCpu", "check", "find"]

#: What ``reproducible=`` takes beside None.
REPRODUCIBLE = ("tokens",)


class ReproducibleCpu(Cpu):
    """The processor, with the records of `treeattn.bins`."""

    def __init__(self, ranks: int) -> None:
        self._most_tokens = bins.MOST_TOKENS // ranks

    def attention(
        self, shape: Shape, records: Any, scale: float, tables: MaskTables | None = None
    ) -> devices.Attention:
        """The kernel for whole numbers, or NumPy: the same bits."""
        return cpu.PlannedAttention(
            records,
            scale=scale,
            tables=tables,
            kv_dtype=shape.kv_dtype,
            k_scale=shape.k_scale,
            v_scale=shape.v_scale,
            most_tokens=self._most_tokens,
        )

    def merge_operator(self, v_dim: int, dtype: Any) -> Any:
        """Whole numbers, whatever the results are."""
        return cpu.BinsOperator(v_dim)


def find(name: str, reproducible: str | None, ranks: int) -> devices.Device:
    """The device that ``device=`` names, for results as ``reproducible=`` says. Raises as `devices.find`."""
    if reproducible is None:
        return devices.find(name)
    if reproducible not in REPRODUCIBLE:
        choices = " or ".join(map(repr, REPRODUCIBLE))
        raise ArgumentError(f"reproducible {reproducible!r:.60} is unknown: use {choices}, or None")
    if name == "cuda":
        raise RestrictionError("reproducible= is for device='cpu': there are no such kernels for a GPU yet")
    devices.find(name)
    return ReproducibleCpu(ranks)


def check(request: Request) -> None:
    """Raise `RestrictionError` where bits would depend on more than the tokens."""
    row = request.scheme.row
    if request.shape.dtype == "float64":
        raise RestrictionError("reproducible= is for results of float32: float64 is summed in whatever order")
    if row.module and not row.compiled:
        raise RestrictionError(
            f"{row.name} folds in an order of its own: reproducible= needs a schedule, such as hierarchical, "
            "or mpi_allreduce, whose operator is ours"
        )
    if request.project is not None:
        raise RestrictionError(
            "project= multiplies in the order of a BLAS library, whose bits are its own: leave it out with "
            "reproducible="
        )
