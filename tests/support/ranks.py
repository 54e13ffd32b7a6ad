"""A rank's share of a problem, and the bits that all ranks of a job must have in common."""

from __future__ import annotations

import hashlib
from typing import Any

from treeattn.shards import parse_layout

__all__ = ["assert_same_bits", "own_run"]


def assert_same_bits(comm: Any, *arrays: Any) -> None:
    """Every rank has the bytes that this one has."""
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    assert comm.allgather(digest) == [digest] * comm.size


def own_run(comm: Any, tokens: int) -> slice:
    """The block of `tokens` that belongs to this rank."""
    (run,) = parse_layout("contiguous").runs(tokens, comm.rank, comm.size)
    return run
