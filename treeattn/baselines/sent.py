"""What a step hands to MPI, counted where it is handed over.

A reducer that sends messages lists (destination, bytes) of each; one that calls a library's collective has a
`Sent`.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Sent"]


class Sent(NamedTuple):
    """The payload that one rank hands to a library's collectives in one step.

    messages is None: how often the bytes travel, and where to, is the library's business.
    """

    messages: None
    bytes: int
