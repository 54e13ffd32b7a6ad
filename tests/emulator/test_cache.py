"""Caches of 8 bits, and caches in pages, on the emulator, beside what the contract says of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.attention_contract import bits, zeros
from tests.support.pages import in_pages
from treeattn.errors import ArgumentError

from .cases import Case, Inputs
from .runtime import EmulatorRuntime
from .test_attention import CONTRACT


def test_a_captured_plan_follows_its_block_table() -> None:
    """Which a serving engine writes in place."""
    case, runtime, lengths = Case("float32", 64, batch=2, splits=3), EmulatorRuntime(), np.array([150, 111])
    q, k, v, _, _ = case.inputs()
    (pages, table), (values, _) = in_pages(k, 16), in_pages(v, 16)
    planned, records = CONTRACT.planned(case, runtime=runtime)
    planned(q, pages, values, lengths, table)
    first, graph = records.copy(), runtime.capture(lambda: planned(q, pages, values, lengths, table))
    table[...] = table[::-1].copy()
    wanted = CONTRACT.attend(case, Inputs(q, pages, values, lengths, None), table=table.copy())
    graph()
    assert (bits(records) == bits(wanted)).all()
    assert not (bits(records) == bits(first)).all()


PAGES = zeros(5, 16, 2, 64)
EIGHT = PAGES.astype("float8_e5m2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": EIGHT, "v": EIGHT}, "needs k_scale and v_scale"),
        ({"k_scale": 1.0}, "are for caches of 8 bits, not of float32"),
        ({"kv_dtype": "int8"}, "kv_dtype 'int8' is unknown: use one of .*, float8_e4m3fn, float8_e5m2"),
        ({"k": PAGES.astype(np.uint8), "v": PAGES.astype(np.uint8)}, "k is uint8: on the GPU"),
        (
            {"k": EIGHT, "v": EIGHT, "k_scale": [1.0] * 3, "v_scale": 1.0},
            r"k_scale has shape \[3\]: one .*\[2\]",
        ),
        ({"k_scale": np.nan}, "k_scale must be a finite number"),
        ({"v_scale": "x"}, "v_scale must be a finite number"),
        ({"q": zeros(1, 1, 2, 64, dtype="float8_e5m2")}, "q is float8_e5m2"),
        ({"block_table": zeros(2, 3, dtype=np.int32)}, r"contiguous int32 \[batch, pages\] = \[1, any\]"),
        ({"block_table": zeros(1, 3, dtype=np.int64)}, "the block table is int64"),
        ({"block_table": [[0]]}, "block_table is a list"),
        (
            {"q": zeros(2, 1, 2, 64), "records": zeros(2, 2, 1, 66)},
            r"\[1, 3\]: contiguous int32 .* \[2, any\]",
        ),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    given = {"k": PAGES, "v": PAGES, "block_table": zeros(1, 3, dtype=np.int32), **change}
    with pytest.raises(ArgumentError, match=message):
        CONTRACT.refused(**given)
