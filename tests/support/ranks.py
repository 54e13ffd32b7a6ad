"""A rank's share of a problem, and the bits and errors that all ranks of a job must have in common."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from treeattn.errors import TreeattnError
from treeattn.shards import parse_layout


def assert_same_bits(comm: Any, *arrays: Any) -> None:
    """Every rank has the bytes that this one has."""
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    assert comm.allgather(digest) == [digest] * comm.size


def own_run(comm: Any, tokens: int) -> slice:
    """The block of `tokens` that belongs to this rank."""
    (run,) = parse_layout("contiguous").runs(tokens, comm.rank, comm.size)
    return run


def raised_by_all(
    comm: Any, call: Callable[[], Any], match: str | None = None, kind: Any = TreeattnError
) -> str:
    """The one line of the error that `call` raises on every rank."""
    with pytest.raises(kind, match=match) as caught:
        call()
    said = type(caught.value).__name__, str(caught.value)
    assert "\n" not in said[1]
    assert comm.allgather(said) == [said] * comm.size
    return said[1]
