"""How splits are chosen."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from treeattn.backends.cuda import splits, variants
from treeattn.backends.cuda.arguments import MAX_GRID
from treeattn.backends.cuda.attention import divisor, most_queries
from treeattn.backends.cuda.splits import Load, choose_splits, cluster_tokens, rounded_steps
from treeattn.errors import BackendError

RESULTS = json.loads((Path(__file__).parents[3] / "docs/results/gpu_h200.json").read_text())
MEASURED = RESULTS["splits"]


def load(heads: int, kv_heads: int, tokens: int, resident: int = 2, kv: str = "bfloat16") -> Load:
    """One query of bfloat16, head_dim 128, on 132 multiprocessors."""
    rows = heads // kv_heads
    variant = variants.choose_variant("bfloat16", kv, 128, rows, tensor_cores=True, shared_limit=227 << 10)
    return Load(
        tiles=kv_heads * math.ceil(rows / variant.rows),
        rows=min(rows, variant.rows),
        tokens=tokens,
        head_dim=128,
        step=variant.step,
        slots=132 * min(resident, variant.blocks),
    )


@pytest.mark.parametrize(("heads", "resident"), [(1, 5), (4, 2), (16, 2)])
@pytest.mark.parametrize("tokens", [65536, 262144])
def test_one_kv_head_keeps_every_multiprocessor_busy(heads: int, resident: int, tokens: int) -> None:
    assert choose_splits(load(heads, 1, tokens, resident)).number >= 132


@examples(100)
@given(
    tiles=st.integers(1, 5000),
    rows=st.integers(1, 16),
    tokens=st.integers(0, 2**31 - 65),
    step=st.sampled_from([16, 32, 64]),
    resident=st.integers(1, 16),
    number=st.none() | st.integers(1, splits.MAX_SPLITS),
)
def test_every_choice_fits_the_kernels(
    tiles: int, rows: int, tokens: int, step: int, resident: int, number: int | None
) -> None:
    work = Load(tiles, rows, tokens, 128, step, 132 * resident)
    chosen = choose_splits(work, number)
    assert 1 <= chosen.fan <= chosen.number <= splits.MAX_SPLITS
    assert number is None or chosen.number == number
    assert rows * max(chosen.fan, chosen.groups) <= 1024  # MAX_PARTIALS of kernels/cuda/combine.cuh
    assert (chosen.groups - 1) * chosen.fan < chosen.number <= chosen.groups * chosen.fan
    if number is None:
        assert chosen.number <= max(1, rounded_steps(tokens, step))


def cost_of_the_rule(row: dict[str, Any]) -> float:
    """What its count costs on an H200, between those that were tried, over the best of these."""
    kv_heads, rows = row["kv_heads"], row["rows"]
    work = load(kv_heads * rows, kv_heads, row["tokens"], resident=5 if rows == 1 else 2)
    found = np.interp(choose_splits(work).number, row["counts"], row["microseconds"])
    return float(found / min(row["microseconds"]))


def test_the_rule_is_near_what_was_fastest() -> None:
    """Over 24 shapes: 8 KV heads and one, 1 to 16 rows, 1 Ki to 64 Ki tokens. 128 have another kernel now."""
    costs: dict[int, list[float]] = {1: [], 8: []}
    for row in MEASURED:
        if row["rows"] <= 16:
            costs[row["kv_heads"]].append(cost_of_the_rule(row))
    assert [len(found) for found in costs.values()] == [12, 12]
    assert np.mean([*costs.values()]) < 1.012
    assert max(costs[1]) < 1.15
    assert max(costs[8]) < 1.02


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kv", "resident", "measured"),
    [  # the fastest of some counts of the kernels as they are, over 64 Ki tokens, or 3 % from it
        (16, 16, "bfloat16", 5, 32),
        (32, 8, "bfloat16", 2, 16),
        (128, 8, "bfloat16", 2, 16),
        (32, 8, "float8_e4m3fn", 3, 49),
        (128, 8, "float8_e4m3fn", 3, 49),
        (8, 8, "float8_e4m3fn", 4, 64),
        (256 * 8, 8, "bfloat16", 2, 16),  # a tree of 64 nodes, of 32: 4 query heads a KV head
        (128 * 8, 8, "bfloat16", 2, 33),
    ],
)
def test_the_rule_finds_what_was_fastest(
    heads: int, kv_heads: int, kv: str, resident: int, measured: int
) -> None:
    assert 0.96 < choose_splits(load(heads, kv_heads, 65536, resident, kv)).number / measured < 1.04


def test_clusters_are_where_they_were_faster() -> None:
    """On an H200, beside the kernel as it is and, where each KV head has one query head, beside tensor
    cores."""
    for row in RESULTS["clusters"]:
        tiles, rows = row["kv_heads"], row["heads"] // row["kv_heads"]
        chosen = row["tokens"] in cluster_tokens(tiles, rows, 132)
        assert chosen == (row["clusters"] < row["others"]), row


def test_clusters_are_for_few_tiles_and_tokens() -> None:
    """One KV head has too many multiprocessors for eight blocks sooner; and a device that holds few clusters
    has none."""
    most = [len(cluster_tokens(*given, 132)) + 255 for given in ((8, 16), (8, 4), (7, 4), (6, 4), (1, 4))]
    assert most == [65536, 32768, 16384, 4096, 2048]
    assert cluster_tokens(1, 4, 132).start == 256
    assert not any(cluster_tokens(8, 4, count) for count in (1, 3, 127))


@pytest.mark.parametrize("number", [None, 2, 132, 256])
def test_a_launch_of_its_own_merges_all_splits_at_once(number: int | None) -> None:
    latent = Load(1, 16, 65536, 512, 32, slots=264, merging=128)
    chosen = choose_splits(latent, number)
    assert chosen.fan == chosen.number == (number or 256)
    assert choose_splits(latent._replace(merging=0), 132).fan == 12  # of one block that is too much at once


def test_tokens_are_looked_at_by_six_bits() -> None:
    assert [rounded_steps(tokens, 64) for tokens in (0, 1, 64, 65, 63 * 64)] == [0, 1, 1, 2, 63]
    assert rounded_steps(65 * 64, 64) == 66
    assert rounded_steps(1000 * 64, 64) == 1008


@examples(100)
@given(number=st.integers(1, 2**31 - 1), value=st.integers(0, 2**31 - 1))
def test_a_divisor_divides(number: int, value: int) -> None:
    multiplier, shift = divisor(number)
    assert multiplier < 2**32
    assert (value * multiplier) >> shift == value // number
    edge = value - value % number  # where it would first go wrong
    assert (edge * multiplier) >> shift == edge // number
    assert edge == 0 or ((edge - 1) * multiplier) >> shift == edge // number - 1


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (9, 3), (1, 1), (64, 64), (128, 8)])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float", 512), ("bfloat16", 128)])
def test_as_many_queries_as_a_launch_has_tiles_for(
    heads: int, kv_heads: int, dtype: str, head_dim: int
) -> None:
    """And of the kernel with the smallest tiles not many more."""
    group, most = heads // kv_heads, most_queries(heads, kv_heads)

    def tiles(queries: int) -> int:
        rows = queries * group
        variant = variants.choose_variant(
            *(dtype, dtype, head_dim, rows), tensor_cores=True, shared_limit=227 << 10
        )
        return kv_heads * math.ceil(rows / variant.rows)

    assert tiles(most) <= MAX_GRID
    assert dtype == "bfloat16" or tiles(most + 8) > MAX_GRID


@pytest.mark.parametrize(
    ("head_dim", "width"), [(8, 64), (64, 64), (72, 80), (112, 128), (256, 256), (264, 512)]
)
def test_heads_are_filled_up_to_the_next_kernel(head_dim: int, width: int) -> None:
    assert variants.kernel_head_dim(head_dim) == width
    variants.check_head_dim(width)


def test_a_head_that_no_kernel_holds() -> None:
    with pytest.raises(BackendError, match="no CUDA kernel for head_dim 520: 512 is the widest"):
        variants.kernel_head_dim(520)
