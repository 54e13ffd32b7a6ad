"""Every mistake that people make with partial results is planted, and named with its rank."""

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
EMPTY = {"out": np.zeros((HEADS, HEAD_DIM), np.float32), "lse": np.full(HEADS, -np.inf, np.float32)}


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


def planted(mistake: str) -> tuple[list[dict], dict | None]:
    """Parts and whole of a system with one mistake in it."""
    parts, whole = dumps(base=2 if mistake == "a whole in base e of parts in base 2" else math.e)
    if mistake == "a merge in base 2":
        whole = merged(parts, log=math.log(2))
    if mistake == "a whole in base e of parts in base 2":
        whole = dumps()[1]  # as vLLM has it over FlashInfer's kernels
    if mistake == "a whole in base 2":
        whole["lse"] /= np.float32(math.log(2))
    if mistake == "rank 2 in base 2":
        parts[2]["lse"] = (parts[2]["lse"] / math.log(2)).astype(np.float32)
    for rank in EVERY:
        times = {"twice": 2, "left out": 0, "lse twice": 2}
        for what, count in times.items():
            if mistake == f"rank {rank} {what}":
                wrong = merged(parts, times=tuple(count if r == rank else 1 for r in EVERY))
                whole = whole | {"lse": wrong["lse"]} if what == "lse twice" else wrong
    if mistake == "heads of rank 1 rolled":
        parts[1] = parts[1] | {"out": np.roll(parts[1]["out"], 1, axis=0)}
    if mistake in ("ranks 1 and 2 alike, one left out", "ranks 1 and 3 alike"):
        twin = 2 if "2" in mistake else 3
        parts[twin] = {name: array * np.float32(1 + 1e-7) for name, array in parts[1].items()}
        whole = merged(parts, times=(1, 0, 1, 1)) if twin == 2 else None
    if mistake == "lse of rank 1 is 0":
        parts[1]["lse"], whole = np.zeros(HEADS, np.float32), None
    if mistake == "rank 1 empty, lse 0":
        parts[1], whole = EMPTY | {"lse": np.zeros(HEADS, np.float32)}, None
    if mistake == "rank 1 marked by +inf":
        parts[1], whole = EMPTY | {"lse": np.full(HEADS, np.inf, np.float32)}, None
    if mistake == "the mark of rank 3 taken for 0":  # nan_to_num makes an empty shard of weight 1
        parts[3] = EMPTY
        lses = np.stack([np.where(np.isfinite(part["lse"]), part["lse"], 0.0) for part in parts])
        whole = merged(parts, lses=lses)
    if mistake == "NaN of rank 0":
        parts[0]["out"][2, 3], whole = np.nan, None
    if mistake == "no single one":
        whole = {"out": whole["out"] + 1}
    return parts, whole


#: Mistake -> the faults that are found, and words of the first.
PLANTED = {
    "a merge in base 2": ([("wrong base", EVERY)] * 2, "reading lse of every rank in base 2 makes the out"),
    "a whole in base e of parts in base 2": ([("wrong base", EVERY)] * 2, "reading lse of every rank in"),
    "a whole in base 2": ([("wrong base", ())], "the right merge, written in base 2, makes the lse of the"),
    "rank 2 in base 2": ([("wrong base", (2,))] * 2, "base 2"),
    **{f"rank {rank} twice": ([("counted twice", (rank,))] * 2, "") for rank in EVERY},
    **{f"rank {rank} left out": ([("left out", (rank,))] * 2, "") for rank in EVERY},
    "rank 1 lse twice": ([("counted twice", (1,))], ""),  # each is explained alone
    "heads of rank 1 rolled": ([("unexplained", ())], ""),  # no other rank is blamed
    "ranks 1 and 2 alike, one left out": (
        [("counted twice", (1, 2)), ("left out", ()), ("left out", ())], "ranks 1 and 2 hold the same part"
    ),
    "ranks 1 and 3 alike": ([("counted twice", (1, 3))], "ranks 1 and 3 hold the same part"),
    "lse of rank 1 is 0": ([("constant", (1,))], "lse is exactly 0 in all heads"),
    "rank 1 empty, lse 0": ([("not empty", (1,))], "of the weight: if it saw nothing, lse must be -inf"),
    "rank 1 marked by +inf": ([("not empty", (1,))], "lse is +inf or NaN"),
    "the mark of rank 3 taken for 0": ([("not empty", (3,))] * 2, ""),
    "NaN of rank 0": ([("not a number", (0,))], "in 1 of 6 heads, first 2"),
    "no single one": ([("unexplained", ())], ""),
}  # fmt: skip


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_named_with_its_rank(mistake: str) -> None:
    wanted, words = PLANTED[mistake]
    parts, whole = planted(mistake)
    found = check_partials(parts, whole)
    assert [(one.kind, one.ranks) for one in found if one.fault] == wanted
    assert words in found[0].text


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("base", ["e", 2])
def test_what_is_right_is_let_be(dtype: Any, base: Any) -> None:
    parts, whole = dumps(dtype, base=math.e if base == "e" else 2)
    assert check_partials(parts, base=base) == []
    assert check_partials(parts, whole, base=base) == []
    assert check_partials(parts, {"out": whole["out"]}, base=base) == []


def test_empty_shards_that_say_so_and_other_axes_are_right() -> None:
    """The axes of lse as flash-attention has them; a mark of weight 0 is a note."""
    parts, whole = dumps()
    turned = [
        {"out": part["out"].reshape(2, 3, HEAD_DIM), "lse": np.ascontiguousarray(part["lse"].reshape(2, 3).T)}
        for part in parts
    ]
    assert check_partials(turned, {"out": whole["out"]}) == []
    right = merged(parts[1:], times=(1, 1, 1))
    parts[0] = EMPTY | {"out": np.full((HEADS, HEAD_DIM), 7, np.float32)}
    assert check_partials(parts, right) == []
    parts[0] = EMPTY | {"lse": np.full(HEADS, -3e4, np.float32)}
    (note,) = check_partials(parts, right)
    assert (note.kind, note.ranks, note.fault) == ("not empty", (0,), False)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fill", [0, np.nan, np.inf])
@pytest.mark.parametrize("mark", [0.0, -np.inf, np.nan, np.inf, 1e30])
def test_hostile_numbers_and_no_heads_are_judged_too(fill: float, mark: float) -> None:
    for shape in ((0, 8), (2, 8), (8,)):
        hostile = {"out": np.full(shape, fill, np.float32), "lse": np.full(shape[:-1], mark)}
        other = {"out": np.ones(shape, np.float32), "lse": np.ones(shape[:-1])}
        for whole in (None, hostile, {"out": np.ones(shape)}):
            found = check_partials([hostile, other], whole)
            assert all(finding.text and finding.kind for finding in found)


PART = {"out": np.zeros((2, 8)), "lse": np.zeros(2)}


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ([], {}, "no part was given"),
        ([{"out": PART["out"]}], {}, "rank 0: lse is not there: one of"),
        ([PART | {"lse": np.zeros(3)}], {}, r"rank 0: out has shape \[2, 8\] and lse \[3\]"),
        ([PART], {"base": 10}, "base 10 is unknown"),
        ([PART | {"out": np.zeros((2, 8), int)}], {}, "rank 0: out is int64: one of float64"),
        ([PART, {"out": np.zeros((3, 8)), "lse": np.zeros(3)}], {}, "the parts are unlike: out is float64"),
        ([PART], {"whole": {"out": np.zeros((2, 8), int)}}, "the whole: out is int64"),
        ([PART], {"whole": {"lse": np.zeros(2)}}, "the whole needs an out of 16 elements"),
        ([PART], {"whole": {"out": np.zeros((2, 8)), "lse": np.zeros(3)}}, r"the whole: out .* lse \[3\]"),
        ([{"out": [1.0], "lse": 0.0}], {}, "out is a list: pass an array"),
    ],
)
def test_what_is_no_dump(parts: Any, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_partials(parts, **options)
