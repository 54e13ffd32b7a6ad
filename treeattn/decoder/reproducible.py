"""Where ``reproducible=`` computes, and what does not go with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from treeattn import bins
from treeattn.attention.positions import Runs
from treeattn.attention.shape import Shape
from treeattn.backends import cpu
from treeattn.backends import device as devices
from treeattn.backends.cpu.attention import check_tokens
from treeattn.backends.cpu.device import Cpu
from treeattn.errors import ArgumentError, RestrictionError

if TYPE_CHECKING:
    from treeattn.decoder.request import Request

#: What ``reproducible=`` takes beside None.
REPRODUCIBLE = ("tokens", "blocks")
_BESIDE = 1 << 16  # tokens that shards do not hold: drafts, and a sink


class ReproducibleCpu(Cpu):
    """The processor, with the records of `treeattn.bins`."""

    def __init__(self, ranks: int, whole_blocks: bool) -> None:
        most = (bins.MOST_TOKENS - _BESIDE) // ranks
        self.bounds = {"most_tokens": most, "whole_blocks": whole_blocks}

    def lengths(self, shape: Shape, lengths: Any, tokens: int) -> Any:
        check_tokens(tokens, self.bounds["most_tokens"])
        return super().lengths(shape, lengths, tokens)

    def product(self, matrices: Sequence[Any]) -> Callable[[Any], Any]:
        """The compiled kernel, by 16 vectors at a time: a row's sum is the same beside whatever rows. Raises
        `BackendError` where it does not serve."""
        return cpu.PlannedProduct(matrices, one_order=True)

    def merge_operator(self, v_dim: int, dtype: Any) -> Any:
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
    return ReproducibleCpu(ranks, reproducible == "blocks")


def check_blocks(runs: Runs | None, ranks: int) -> None:
    """Raise `RestrictionError` where the tokens of a rank, at these positions, are not whole blocks of 32, or
    nobody knows."""
    if runs is None and ranks > 1:
        raise RestrictionError(
            "reproducible='blocks' asks where tokens stand: plan with cache=CacheFormat(positions=)"
        )
    table = [] if runs is None else runs.table.tolist()
    for index, start, step, count in table:
        if (count > 1 and step != 1) or start % bins.BLOCK or index % bins.BLOCK:
            raise RestrictionError(
                f"reproducible='blocks' takes whole blocks of {bins.BLOCK} positions, but position {start} "
                f"begins a part of one: deal out multiples of {bins.BLOCK}, or take reproducible='tokens'"
            )


def check_shape(shape: Shape) -> None:
    """Raise `RestrictionError` for what is summed in whatever order."""
    if shape.dtype == "float64":
        raise RestrictionError("reproducible= is for results of float32: float64 is summed in whatever order")


def check(request: Request) -> None:
    """Raise `RestrictionError` where bits would depend on more than the tokens."""
    row = request.scheme.row
    check_shape(request.shape)
    if row.module and not row.compiled:
        raise RestrictionError(
            f"{row.name} folds in an order of its own: reproducible= needs a schedule, such as hierarchical, "
            "or mpi_allreduce, whose operator is ours"
        )
    if request.reproducible == "blocks" and request.masked:
        raise RestrictionError(
            "a mask is of draft tokens, which are dealt out one by one: reproducible='tokens' serves them"
        )
