"""Every mistake that people make with partial results is planted, and named with its rank."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from treeattn import reference
from treeattn.errors import ArgumentError
from treeattn.study.partials import check_partials

RANKS, HEADS, HEAD_DIM = 4, 6, 16
EVERY = tuple(range(RANKS))


def dumps(dtype: Any = np.float32, *, base: float = math.e) -> tuple[list[dict], dict]:
    """What the ranks hold, and the right merge of it."""
    draw = np.random.default_rng(0)
    q = (draw.standard_normal((1, 1, HEADS, HEAD_DIM)) * 4).astype(dtype)
    shards = draw.standard_normal((RANKS, 2, 1, 9, HEADS, HEAD_DIM)).astype(dtype)
    partials = [reference.partial(q, k, v, scale=HEAD_DIM**-0.5) for k, v in shards]
    results = [reference.combine(some) for some in (*([one] for one in partials), partials)]
    *parts, whole = (
        {"out": out[0, 0].astype(dtype), "lse": (lse[0, :, 0] / math.log(base)).astype(np.float32)}
        for out, lse in results
    )
    return parts, whole


def merged(parts: list[dict], *, log: float = 1.0, times: tuple = (1,) * RANKS, lses: Any = None) -> dict:
    """The merge of a system that is mistaken."""
    lse = np.stack([part["lse"] for part in parts]).astype(np.float64) if lses is None else lses
    out = np.stack([part["out"] for part in parts]).astype(np.float64)
    weight = np.exp(lse * log) * np.array(times)[:, None]
    total = weight.sum(0)
    return {
        "out": ((weight[..., None] * out).sum(0) / total[:, None]).astype(np.float32),
        "lse": (np.log(total) / log).astype(np.float32),
    }


def faults(*given: Any, **options: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(found.kind, found.ranks) for found in check_partials(*given, **options) if found.fault]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("base", ["e", 2])
def test_what_is_right_is_let_be(dtype: Any, base: Any) -> None:
    parts, whole = dumps(dtype, base=math.e if base == "e" else 2)
    assert check_partials(parts, base=base) == []
    assert check_partials(parts, whole, base=base) == []
    assert check_partials(parts, {"out": whole["out"]}, base=base) == []


def test_an_empty_shard_that_says_so_is_right() -> None:
    parts, _ = dumps()
    right = merged(parts[1:], times=(1, 1, 1))
    parts[0] |= {"out": np.full((HEADS, HEAD_DIM), 7, np.float32), "lse": np.full(HEADS, -np.inf, np.float32)}
    assert check_partials(parts, right) == []


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_merge_in_the_wrong_base(dtype: Any) -> None:
    parts, _ = dumps(dtype)
    whole = merged(parts, log=math.log(2))
    found = check_partials(parts, whole)
    assert [(f.kind, f.ranks) for f in found] == [("wrong base", EVERY)] * 2
    assert found[0].text == "reading lse of every rank in base 2 makes the out of the whole"
    assert found[1].text.endswith("in base 2, written in base 2, makes the lse of the whole")
    assert faults(parts, {"out": whole["out"]}) == [("wrong base", EVERY)]
    assert check_partials(parts, whole, base=2) == []  # where base 2 was meant


def test_parts_in_base_2_rightly_merged_to_a_whole_in_base_e() -> None:
    """As vLLM has it over FlashInfer's kernels."""
    parts, _ = dumps(base=2)
    _, whole = dumps()
    out, lse = check_partials(parts, whole)
    assert (out.kind, out.ranks, lse.kind) == ("wrong base", EVERY, "wrong base")
    assert lse.text == "reading lse of every rank in base 2 makes the lse of the whole"
    (lse,) = check_partials(parts, whole, base=2)
    assert lse.text == "the right merge, written in base e, makes the lse of the whole"


def test_a_whole_whose_lse_is_in_another_base() -> None:
    parts, whole = dumps()
    whole["lse"] /= np.float32(math.log(2))
    (found,) = check_partials(parts, whole)
    assert (found.kind, found.ranks) == ("wrong base", ())
    assert found.text == "the right merge, written in base 2, makes the lse of the whole"


def test_one_rank_whose_lse_is_in_another_base() -> None:
    parts, whole = dumps()
    parts[2]["lse"] = (parts[2]["lse"] / math.log(2)).astype(np.float32)
    assert faults(parts, whole) == [("wrong base", (2,))] * 2


@pytest.mark.parametrize("rank", EVERY)
def test_a_merge_that_counts_a_shard_twice_or_not_at_all(rank: int) -> None:
    parts, right = dumps()
    twice, never = ([n if r == rank else 1 for r in EVERY] for n in (2, 0))
    assert faults(parts, merged(parts, times=tuple(twice))) == [("counted twice", (rank,))] * 2
    assert faults(parts, merged(parts, times=tuple(never))) == [("left out", (rank,))] * 2
    mixed = right | {"lse": merged(parts, times=tuple(twice))["lse"]}  # each is explained alone
    assert faults(parts, mixed) == [("counted twice", (rank,))]


def test_heads_that_are_rolled_on_one_rank_blame_no_other() -> None:
    parts, whole = dumps()
    for name in ("out", "lse"):
        turned = [
            part | {name: np.roll(part[name], 1, axis=0)} if r == 1 else part for r, part in enumerate(parts)
        ]
        found = check_partials(turned, whole)
        assert found
        assert {(f.kind, f.ranks) for f in found} == {("unexplained", ())}
        assert "nearest" not in " ".join(f.text for f in found)


def test_a_mistake_that_two_ranks_could_have_made_blames_none() -> None:
    """Ranks 1 and 2 have the same part in other halves of it than rank 0: leaving either out is the same."""
    parts, _ = dumps()
    parts[2] = {name: array * np.float32(1 + 1e-7) for name, array in parts[1].items()}
    found = check_partials(parts, merged(parts, times=(1, 0, 1, 1)))
    assert [(f.kind, f.ranks) for f in found] == [
        ("counted twice", (1, 2)),
        ("left out", ()),
        ("left out", ()),
    ]
    assert "leaving rank 1 out or leaving rank 2 out makes" in found[1].text


@pytest.mark.parametrize(("value", "fault"), [(0, True), (3, False)])
def test_an_lse_that_nobody_wrote(value: float, fault: bool) -> None:
    """Exactly 0 in all heads, where a kernel returned no logsumexp."""
    parts, _ = dumps()
    parts[1]["lse"] = np.full(HEADS, value, np.float32)
    (found,) = check_partials(parts)
    assert (found.kind, found.ranks, found.fault) == ("constant", (1,), fault)
    assert f"lse is exactly {value} in all heads" in found.text


def test_lse_of_0_on_every_rank() -> None:
    parts, _ = dumps()
    for part in parts:
        part["lse"] = np.zeros(HEADS, np.float32)
    assert faults(parts) == [("constant", (rank,)) for rank in EVERY]


def test_two_ranks_that_hold_one_shard() -> None:
    parts, _ = dumps()
    parts[3] = {name: array * np.float32(1 + 1e-7) for name, array in parts[1].items()}
    (found,) = check_partials(parts)
    assert (found.kind, found.ranks) == ("counted twice", (1, 3))
    assert "ranks 1 and 3 hold the same part" in found.text


@pytest.mark.parametrize(
    ("lse", "text"),
    [(0.0, "of the weight: if it saw nothing, lse must be -inf"), (3.0, "out is 0 and has "),
     (np.inf, "lse is +inf or NaN"), (np.nan, "lse is +inf or NaN")],
)  # fmt: skip
def test_an_empty_shard_that_is_not_empty(lse: float, text: str) -> None:
    parts, _ = dumps()
    parts[1]["out"][:], parts[1]["lse"][:] = 0, lse
    (found,) = check_partials(parts)
    assert (found.kind, found.ranks, found.fault) == ("not empty", (1,), True)
    assert text in found.text
    assert "in 6 of 6 heads" in found.text


def test_an_empty_shard_whose_lse_outweighs_nothing_is_a_note() -> None:
    parts, _ = dumps()
    right = merged(parts, times=(1, 0, 1, 1))
    parts[1] |= {"out": np.zeros((HEADS, HEAD_DIM), np.float32), "lse": np.full(HEADS, -3e4, np.float32)}
    (note,) = check_partials(parts, right)
    assert (note.kind, note.ranks, note.fault) == ("not empty", (1,), False)


def test_a_merge_that_took_a_mark_for_zero() -> None:
    """nan_to_num makes an empty shard of weight 1."""
    parts, _ = dumps()
    parts[3] |= {"out": np.zeros((HEADS, HEAD_DIM), np.float32), "lse": np.full(HEADS, -np.inf, np.float32)}
    lses = np.stack([np.where(np.isfinite(part["lse"]), part["lse"], 0.0) for part in parts])
    assert faults(parts, merged(parts, lses=lses)) == [("not empty", (3,))] * 2


def test_nan_beside_a_finite_lse() -> None:
    parts, _ = dumps()
    parts[0]["out"][2, 3] = np.nan
    (found,) = check_partials(parts)
    assert (found.kind, found.ranks) == ("not a number", (0,))
    assert "in 1 of 6 heads, first 2" in found.text


def test_a_whole_that_no_single_mistake_makes() -> None:
    parts, whole = dumps()
    (found,) = check_partials(parts, {"out": whole["out"] + 1})
    assert (found.kind, found.ranks) == ("unexplained", ())
    averaged = {"out": np.mean([part["out"] for part in parts], axis=0)}
    assert check_partials(parts, averaged)[0].text.startswith("taking lse of every rank for 0 makes the out")


def test_axes_of_lse_may_be_those_of_flash_attention() -> None:
    parts, whole = dumps()
    turned = [
        {"out": part["out"].reshape(2, 3, HEAD_DIM), "lse": np.ascontiguousarray(part["lse"].reshape(2, 3).T)}
        for part in parts
    ]
    assert check_partials(turned, {"out": whole["out"]}) == []


def _part() -> dict:
    return {"out": np.zeros((2, 8)), "lse": np.zeros(2)}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fill", [0, np.nan, np.inf])
@pytest.mark.parametrize("mark", [0.0, -np.inf, np.nan, np.inf, 1e30])
@pytest.mark.parametrize("shape", [(0, 8), (2, 8), (8,)])
def test_hostile_numbers_and_no_heads_are_judged_too(fill: float, mark: float, shape: tuple) -> None:
    hostile = {"out": np.full(shape, fill, np.float32), "lse": np.full(shape[:-1], mark)}
    for whole in (None, hostile, {"out": np.ones(shape)}):
        found = check_partials(
            [hostile, {"out": np.ones(shape, np.float32), "lse": np.ones(shape[:-1])}], whole
        )
        assert all(finding.text and finding.kind for finding in found)


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ([], {}, "no part was given"),
        ([{"out": np.zeros((2, 8))}], {}, "rank 0: lse is not there: one of"),
        (
            [{"out": np.zeros((2, 8)), "lse": np.zeros(3)}],
            {},
            r"rank 0: out has shape \[2, 8\] and lse \[3\]",
        ),
        ([{"out": np.zeros((2, 8)), "lse": np.zeros(2)}], {"base": 10}, "base 10 is unknown"),
        ([{"out": np.zeros((2, 8), int), "lse": np.zeros(2)}], {}, "rank 0: out is int64: one of float64"),
        ([{"out": np.zeros((2, 8)), "lse": np.array(["a", "b"])}], {}, "rank 0: lse is <U1: one of"),
        (
            [_part(), {"out": np.zeros((3, 8)), "lse": np.zeros(3)}],
            {},
            "the parts are unlike: out is float64",
        ),
        ([_part()], {"whole": {"out": np.zeros((2, 8), int)}}, "the whole: out is int64"),
        ([_part()], {"whole": {"lse": np.zeros(2)}}, "the whole needs an out of 16 elements"),
        ([_part()], {"whole": {"out": np.zeros((2, 8)), "lse": np.zeros(3)}}, r"the whole: out .* lse \[3\]"),
        ([{"out": [1.0], "lse": 0.0}], {}, "out is a list: pass an array"),
        (
            [{"out": np.zeros((2, 8)), "lse": np.zeros(2)}],
            {"whole": {"out": np.zeros(3)}},
            "an out of 16 el",
        ),
    ],
)
def test_what_is_no_dump(parts: Any, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_partials(parts, **options)
