"""What the committed results say of where they come from."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FILES = sorted(path for path in RESULTS.rglob("*") if path.suffix in {".json", ".xz", ".jsonl"})
# Of a tree with changes: to be measured anew, and then no longer listed.
OLD = {"compare_2.jsonl.xz", "compare_4.jsonl.xz"}


def cases() -> list[object]:
    old = pytest.mark.xfail(strict=True, reason="measured with changes that are in no commit")
    return [pytest.param(path, id=path.name, marks=old if path.name in OLD else ()) for path in FILES]


@pytest.mark.parametrize("path", cases())
def test_results_come_from_a_clean_commit(path: Path) -> None:
    """A number that nobody can measure again, since its sources were never committed, is no result."""
    text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    assert b"+dirty" not in text
