"""Every mistake that people make with partial results is planted, and named with its rank."""

from __future__ import annotations

import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from treeattn import reference
from treeattn.errors import ArgumentError
from treeattn.study.partials import check_partials

RANKS, HEADS, HEAD_DIM = 4, 6, 16
SCALE = HEAD_DIM**-0.5


def dumps(dtype: Any = np.float32, *, tokens: int = 9, qkv: bool = False, base: float = math.e) -> list[dict]:
    """What the ranks hold: parts, and the right merge of them."""
    draw = np.random.default_rng(0)
    q = (draw.standard_normal((1, 1, HEADS, HEAD_DIM)) * 4).astype(dtype)
    made, partials = [], []
    for _ in range(RANKS):
        k, v = (draw.standard_normal((1, tokens, HEADS, HEAD_DIM)).astype(dtype) for _ in "kv")
        partials.append(reference.partial(q, k, v, scale=SCALE))
        made.append(
            _dump(reference.combine(partials[-1:]), dtype, base) | ({"q": q, "k": k, "v": v} if qkv else {})
        )
    whole = _dump(reference.combine(partials), dtype, base)
    return [part | {f"merged_{name}": array.copy() for name, array in whole.items()} for part in made]


def _dump(result: tuple, dtype: Any, base: float) -> dict:
    """out [heads, head_dim] and lse [heads]."""
    lse = (result[1][0, :, 0] / math.log(base)).astype(np.float32)
    return {"out": result[0][0, 0].astype(dtype), "lse": lse}


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
    parts = dumps(dtype, qkv=True, base=math.e if base == "e" else 2)
    assert check_partials(parts, base=base) == []
    assert check_partials([{n: part[n] for n in ("out", "lse")} for part in parts], base=base) == []


def test_an_empty_shard_that_says_so_is_right() -> None:
    parts = dumps()
    for part in parts:
        del part["merged_out"], part["merged_lse"]
    right = merged(parts[1:], times=(1, 1, 1))
    parts[0] |= {"out": np.full((HEADS, HEAD_DIM), 7, np.float32), "lse": np.full(HEADS, -np.inf, np.float32)}
    assert check_partials(parts, right) == []


@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_merge_in_the_wrong_base(dtype: Any, with_lse: bool) -> None:
    parts = dumps(dtype)
    whole = merged(parts, log=math.log(2))
    found = check_partials(parts, whole if with_lse else {"out": whole["out"]})
    assert [(f.kind, f.ranks) for f in found] == [("wrong base", (0, 1, 2, 3))]
    assert found[0].text.startswith("reading every lse in base 2 makes the whole, to ")
    (head,) = found[0].numbers["head"]
    assert f" of 6 heads are not the merge in base e: out[{head}, " in found[0].text
    parts = [{name: part[name] for name in ("out", "lse")} for part in parts]
    assert check_partials(parts, whole, base=2) == []  # where base 2 was meant


def test_a_whole_whose_lse_is_in_another_base() -> None:
    parts = dumps()
    right = {"out": parts[0]["merged_out"], "lse": parts[0]["merged_lse"] / np.float32(math.log(2))}
    (found,) = check_partials(parts, right)
    assert (found.kind, found.ranks) == ("wrong base", ())
    assert found.text.startswith("writing the lse of the whole in base 2 makes the whole")
    assert "out is the merge in base e, lse is not" in found.text


def test_one_rank_whose_lse_is_in_another_base() -> None:
    parts = dumps()
    right = {"out": parts[0]["merged_out"], "lse": parts[0]["merged_lse"]}
    parts[2]["lse"] = (parts[2]["lse"] / math.log(2)).astype(np.float32)
    assert faults(parts, right) == [("wrong base", (2,))]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_merge_that_counts_a_shard_twice_or_not_at_all(rank: int) -> None:
    parts = dumps()
    twice, never = ([n if r == rank else 1 for r in range(RANKS)] for n in (2, 0))
    assert faults(parts, merged(parts, times=tuple(twice))) == [("counted twice", (rank,))]
    assert faults(parts, merged(parts, times=tuple(never))) == [("left out", (rank,))]


def test_two_ranks_that_hold_one_shard() -> None:
    parts = dumps()
    for name in ("out", "lse"):
        parts[3][name] = parts[1][name] * np.float32(1 + 1e-7)
    found = check_partials([{n: part[n] for n in ("out", "lse")} for part in parts])
    assert [(f.kind, f.ranks) for f in found] == [("counted twice", (1, 3))]
    assert "ranks 1 and 3 hold the same part" in found[0].text


def test_tokens_that_are_on_two_ranks() -> None:
    parts = dumps(qkv=True)
    for name in "kv":
        parts[2][name] = parts[2][name].copy()
        parts[2][name][:, 4:7] = parts[0][name][:, 1:4]
    out, lse = reference.attention(parts[2]["q"], parts[2]["k"], parts[2]["v"], scale=SCALE)
    parts[2] |= _dump((out, lse), np.float32, math.e)
    found = check_partials(parts, merged(parts))
    assert [(f.kind, f.ranks) for f in found] == [("counted twice", (0, 2))]
    assert "3 of the 9 tokens of rank 2 are on rank 0 too" in found[0].text


@pytest.mark.parametrize(
    ("lse", "text"),
    [
        (0.0, r"head \[\d\] has 0, which takes [0-9.e-]+ of the weight"),
        (3.0, r"head \[\d\] has 3, which takes"),
        (np.inf, r"lse is \+inf in 6 of 6 heads"),
        (np.nan, r"lse is NaN in 6 of 6 heads"),
    ],
)
def test_an_empty_shard_that_is_not_empty(lse: float, text: str) -> None:
    parts = dumps()
    parts[1]["out"][:] = 0
    parts[1]["lse"][:] = lse
    found = [f for f in check_partials([{n: p[n] for n in ("out", "lse")} for p in parts]) if f.fault]
    assert [(f.kind, f.ranks) for f in found] == [("not empty", (1,))]
    assert found[0].numbers["heads"] == HEADS
    assert re.search(text, found[0].text)


def test_an_empty_shard_whose_lse_outweighs_nothing_is_a_note() -> None:
    parts = dumps()
    right = merged(parts, times=(1, 0, 1, 1))
    parts[1] |= {"out": np.zeros((HEADS, HEAD_DIM), np.float32), "lse": np.full(HEADS, -3e4, np.float32)}
    (note,) = check_partials(parts, right)
    assert (note.kind, note.ranks, note.fault) == ("not empty", (1,), False)


def test_a_merge_that_took_a_mark_for_zero() -> None:
    """nan_to_num makes an empty shard of weight 1."""
    parts = dumps()
    parts[3] |= {"out": np.zeros((HEADS, HEAD_DIM), np.float32), "lse": np.full(HEADS, -np.inf, np.float32)}
    lses = np.stack([np.where(np.isfinite(part["lse"]), part["lse"], 0.0) for part in parts])
    assert faults(parts, merged(parts, lses=lses)) == [("not empty", (3,))]


def test_a_rank_that_differs() -> None:
    parts = dumps()
    parts[2]["merged_out"][3, 1] += 1e-3
    found = check_partials(parts)
    assert [(f.kind, f.ranks) for f in found] == [("differs", (2,))]
    assert "merged_out is not that of rank 0, off by up to 0.001" in found[0].text
    for wrong in ({"out": parts[1]["out"][:3], "lse": parts[1]["lse"][:3]},
                  {"out": parts[1]["out"].astype(np.float16), "lse": parts[1]["lse"]}):  # fmt: skip
        assert faults([parts[0], wrong, parts[2]]) == [("differs", (1,))]


def test_nan_beside_a_finite_lse() -> None:
    parts = dumps()
    parts[0]["out"][2, 3] = np.nan
    found = [f for f in check_partials([{n: p[n] for n in ("out", "lse")} for p in parts]) if f.fault]
    assert [(f.kind, f.ranks) for f in found] == [("not a number", (0,))]
    assert "1 of 6 heads, first [2]" in found[0].text


def test_what_q_k_and_v_say() -> None:
    parts = dumps(qkv=True)
    for part in parts:
        del part["merged_out"], part["merged_lse"]
    parts[0]["lse"] = (parts[0]["lse"] / math.log(2)).astype(np.float32)
    parts[1]["out"] = parts[1]["out"] + np.float32(0.1)
    parts[2]["lse"] = parts[2]["lse"] + 1
    assert faults(parts) == [("wrong base", (0,)), ("differs", (1,)), ("differs", (2,))]
    assert faults(dumps(qkv=True), scale=2 * SCALE)[:2] == [("differs", (0,)), ("differs", (0,))]


def test_a_whole_that_no_single_mistake_makes() -> None:
    parts = dumps()
    found = check_partials(parts, {"out": parts[0]["merged_out"] + 1})
    assert [(f.kind, f.ranks) for f in found] == [("unexplained", ())]
    averaged = {"out": np.mean([part["out"] for part in parts], axis=0)}
    assert check_partials(parts, averaged)[0].text.startswith("averaging without weights makes the whole")


def test_axes_of_lse_may_be_those_of_flash_attention() -> None:
    parts = [
        {"out": part["out"].reshape(2, 3, HEAD_DIM), "lse": part["lse"].reshape(2, 3)} for part in dumps()
    ]
    turned = [{"out": part["out"], "lse": np.ascontiguousarray(part["lse"].T)} for part in parts]
    whole = merged([{"out": part["out"].reshape(HEADS, -1), "lse": part["lse"].ravel()} for part in parts])
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
        ([{"out": np.zeros((2, 8))}], {}, "rank 0: no 'lse', only out"),
        (
            [{"out": np.zeros((2, 8)), "lse": np.zeros(3)}],
            {},
            r"rank 0: out has shape \[2, 8\] and lse \[3\]",
        ),
        ([{"out": np.zeros((2, 8)), "lse": np.zeros(2)}], {"base": 10}, "base 10 is unknown"),
        ([{"out": np.zeros((2, 8), int), "lse": np.zeros(2)}], {}, "rank 0: out is int64: one of float64"),
        ([{"out": np.zeros((2, 8)), "lse": np.array(["a", "b"])}], {}, "rank 0: lse is <U1: one of"),
        (
            [dict.fromkeys("qk", np.zeros((1, 5, 4, 8))) | {"v": np.zeros((1, 5, 3, 8))} | _part()],
            {},
            "rank 0: q .* do not fit",
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
