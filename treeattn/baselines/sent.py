"""What a step hands to MPI, counted where it is handed over."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Sent"]


class Sent(NamedTuple):
    """Messages and payload bytes that one rank sends in one step.

    messages is None for a library's collective: `bytes` is then the payload that was handed in, and how
    often it travels is the library's business.
    """

    messages: int | None
    bytes: int
