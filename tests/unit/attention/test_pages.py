"""Block tables: what is read of them, and what cannot be."""

from typing import Any

import numpy as np
import pytest

from treeattn.attention.arguments import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.pages import CheckedTable, as_table
from treeattn.attention.positions import Runs
from treeattn.errors import ArgumentError


def check(table: Any, lengths: Any = (9, 5), pages: int = 6, visible: MaskTables | None = None) -> None:
    """Pages of 4 tokens."""
    CheckedTable().check(as_table(table, len(lengths)), (pages, 4), np.array(lengths), visible)


TABLE = [[0, 3, 5, -1], [2, 1, -1, -1]]


def test_tables_that_can_be() -> None:
    check(TABLE)
    check([[0, 1, 2], [0, 1, 3]], (12, 9))  # a prefix that two sequences share
    check([[0, 0, 9, -7]], (3,))  # what nobody reads is not looked at
    check(np.zeros((2, 0), np.int64), (0, 0), pages=0)
    check(np.maximum(TABLE, 0).astype(np.uint8))
    check([[], []], (0, 0), pages=0)


@pytest.mark.parametrize(
    ("table", "lengths", "message"),
    [
        (TABLE, None, "needs lengths= "),
        (TABLE, (9, 17), "a length of 17 is more than the block table holds, 4 pages of 4 tokens"),
        (TABLE, (13, 5), r"block_table\[0, 3\] is -1, no page, but sequence 0 has tokens there"),
        ([[0, 1], [2, 6]], (8, 5), r"block_table\[1, 1\] is 6, but k and v have 6 pages"),
        ([[0, 1, 2], [4, 5, 4]], (9, 9), "has page 4 twice in sequence 1"),
        ([[0, 1], [-5, 1]], (8, 1), r"block_table\[1, 0\] is -5"),
        ([0, 1], (8, 1), r"block_table is int64 \[2\]"),
        ([[0.0], [1.0]], (1, 1), r"block_table is float64 \[2, 1\]"),
        ([[0]], (1, 1), r"= \[2, any\] are needed"),
        ([[2**40], [0]], (1, 1), "beyond int32"),
        ([[0], [1, 2]], (1, 1), "rows of different lengths: fill them up with -1"),
        (object(), (1, 1), "block_table is a object"),
    ],
)
def test_tables_that_cannot_be(table: Any, lengths: Any, message: str) -> None:
    given = None if lengths is None else np.array(lengths)
    with pytest.raises(ArgumentError, match=message):
        CheckedTable().check(as_table(table, 2), (6, 4), given, None)


def test_a_table_is_looked_at_again_where_it_changed() -> None:
    table, checked = np.array(TABLE, np.int32), CheckedTable()
    checked.check(table, (6, 4), np.array([9, 5]), None)
    checked.check(table, (6, 4), np.array([10, 6]), None)
    for change in ({"lengths": [13, 5]}, {"pages": 5}):
        with pytest.raises(ArgumentError):
            checked.check(table, (change.get("pages", 6), 4), np.array(change.get("lengths", [9, 5])), None)  # type: ignore[arg-type]
    table[1, 0] = 6
    with pytest.raises(ArgumentError, match=r"block_table\[1, 0\] is 6"):
        checked.check(table, (6, 4), np.array([9, 5]), None)


def test_pages_that_no_query_sees_may_be_gone() -> None:
    """Between the leading tokens and a window, and behind a causal bound; not where a draft is seen."""
    visible = MaskTables(Rules(causal=True, window=(3, None), leading=2), 1, 2)
    visible.update(Runs([(0, 1, 40)]), 40, [33], [20, 22])
    table = [[7, -1, -1, -1, 0, 1, -1, -1, -1, -1]]
    check(table, [33], 8, visible)
    for entry in (0, 4, 5):
        broken = np.array(table)
        broken[0, entry] = -1
        with pytest.raises(ArgumentError, match=rf"block_table\[0, {entry}\] is -1"):
            check(broken, [33], 8, visible)
    visible.update(Runs([(0, 1, 40)]), 40, [33], [20, 22], np.ones((1, 2, 2), bool))
    with pytest.raises(ArgumentError, match=r"block_table\[0, 7\] is -1"):
        check(table, [33], 8, visible)
