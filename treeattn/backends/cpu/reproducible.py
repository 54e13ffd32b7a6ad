"""The processor where ``reproducible=`` computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treeattn import bins
from treeattn.attention.shape import Shape
from treeattn.backends import cpu
from treeattn.backends.cpu.attention import check_tokens
from treeattn.backends.cpu.device import Cpu
from treeattn.errors import ArgumentError

#: What ``reproducible=`` takes apart from None.
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
        """The compiled kernel, by 16 vectors at a time: a row's sum is the same whatever other rows there
        are. Raises `BackendError` where it does not serve."""
        return cpu.PlannedProduct(matrices, one_order=True)

    def merge_operator(self, v_dim: int, dtype: Any) -> Any:
        return cpu.BinsOperator(v_dim)


def device(reproducible: str, ranks: int) -> ReproducibleCpu:
    """For results as ``reproducible=`` says. Raises `ArgumentError`."""
    if reproducible not in REPRODUCIBLE:
        choices = " or ".join(map(repr, REPRODUCIBLE))
        raise ArgumentError(f"reproducible {reproducible!r:.60} is unknown: use {choices}, or None")
    return ReproducibleCpu(ranks, reproducible == "blocks")
