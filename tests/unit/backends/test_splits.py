"""How splits are chosen, by the shipped constants and by others."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from treeattn.backends.cuda import splits, variants
from treeattn.backends.cuda.arguments import MAX_GRID
from treeattn.backends.cuda.attention import divisor, most_queries
from treeattn.backends.cuda.splits import Constants, Load, choose_splits, merge_time, predict, rounded_steps
from treeattn.errors import BackendError

SIMPLE = Constants(
    launch=100,
    wave=10,
    megabyte=3,
    l2_megabyte=1,
    latency=4,
    level=7,
    merged_megabyte=1000,
    next_launch=50,
)


def load(heads: int, kv_heads: int, tokens: int, resident: int = 2, dtype: str = "bfloat16") -> Load:
    """One query, head_dim 128, on 132 multiprocessors."""
    rows = heads // kv_heads
    variant = variants.choose_variant(dtype, dtype, 128, rows, tensor_cores=True, shared_limit=227 << 10)
    return Load(
        tiles=kv_heads * math.ceil(rows / variant.rows),
        rows=min(rows, variant.rows),
        tokens=tokens,
        head_dim=128,
        token_bytes=2 * 128 * (4 if dtype == "float" else 2),
        step=variant.step,
        in_flight=variant.in_flight,
        slots=132 * resident,
        multiprocessors=132,
    )


@pytest.mark.parametrize(("heads", "resident"), [(1, 5), (4, 2), (16, 2)])
@pytest.mark.parametrize("tokens", [65536, 262144])
def test_one_kv_head_keeps_every_multiprocessor_busy(heads: int, resident: int, tokens: int) -> None:
    assert choose_splits(load(heads, 1, tokens, resident)).number >= 132


@pytest.mark.parametrize(("heads", "kv_heads", "resident"), [(16, 16, 5), (32, 8, 2), (64, 8, 2)])
def test_a_long_shard_fills_one_wave(heads: int, kv_heads: int, resident: int) -> None:
    blocks = kv_heads * choose_splits(load(heads, kv_heads, 65536, resident)).number
    assert 0.9 * 132 * resident < blocks <= 132 * resident


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
    work = Load(tiles, rows, tokens, 128, 512, step, step, 132 * resident, 132)
    chosen = choose_splits(work, number)
    assert 1 <= chosen.fan <= chosen.number <= splits.MAX_SPLITS
    assert number is None or chosen.number == number
    assert rows * max(chosen.fan, chosen.groups) <= splits.MAX_PARTIALS
    assert (chosen.groups - 1) * chosen.fan < chosen.number <= chosen.groups * chosen.fan
    if number is None:
        assert chosen.number <= max(1, rounded_steps(tokens, step))


def test_no_tokens_or_few_are_not_cut() -> None:
    for tokens in (0, 1, 32):
        assert choose_splits(load(16, 16, tokens)).number == 1


def test_rows_weigh_in_the_merge() -> None:
    """The same blocks and bytes: more rows to merge make fewer splits, or groups of them."""
    one = Load(4, 1, 65536, 128, 512, 64, 128, 264, 132)
    sixteen = one._replace(rows=16)
    free = SIMPLE._replace(merged_megabyte=1e-9)
    assert choose_splits(sixteen, None, free).number == choose_splits(one, None, free).number
    assert choose_splits(sixteen, None, SIMPLE).number < choose_splits(one, None, SIMPLE).number
    assert choose_splits(one, 64, SIMPLE._replace(merged_megabyte=1)).groups == 1
    assert choose_splits(sixteen, 64, SIMPLE._replace(level=1e-3)).groups == 8


def test_the_model_by_hand() -> None:
    work = Load(
        tiles=10,
        rows=2,
        tokens=6400,
        head_dim=128,
        token_bytes=500,
        step=64,
        in_flight=128,
        slots=40,
        multiprocessors=20,
    )
    whole = 10 * 6400 * 500 / 1e6  # 32 megabytes
    assert predict(work, 1, 1, SIMPLE) == pytest.approx(100 + 10 + math.hypot(3 * whole * 2, 4 * 50))
    merged = 2 * 5 * 130 * 4 / 1e6 * 1000
    assert predict(work, 5, 5, SIMPLE) == pytest.approx(100 + 20 + math.hypot(3 * whole, 4 * 20) + 7 + merged)
    two_levels = 2 * (3 + 2) * 130 * 4 / 1e6 * 1000
    assert predict(work, 5, 3, SIMPLE) == pytest.approx(
        100 + 20 + math.hypot(3 * whole, 4 * 20) + 14 + two_levels
    )


def test_tiles_of_one_wave_read_memory_once_by_hand() -> None:
    """Eight tiles, of two KV heads, share their tokens by four: 64 megabytes, 16 of them not read before."""
    work = Load(8, 16, 16000, 128, 500, 64, 64, slots=40, multiprocessors=20, sharing=4)

    def streamed(splits: int, load: Load = work, **others: float) -> float:
        constants = SIMPLE._replace(latency=1e-9, level=0, merged_megabyte=0, **others)
        waves = math.ceil(load.tiles * splits / load.slots)
        return float(predict(load, splits, splits, constants)) - 100 - 10 * waves

    assert streamed(5) == pytest.approx(max(3 * 16, 1 * 64))
    assert streamed(5, l2_megabyte=0.1) == pytest.approx(3 * 16)
    assert streamed(6) == pytest.approx(3 * 32)  # two waves, in each of which half of the tiles run
    assert streamed(60) == pytest.approx(3 * 64)  # a wave for each tile, and no more
    batch = work._replace(tiles=80, batch=10)  # sequences run one after another
    assert streamed(5, batch) == pytest.approx(10 * 64)
    assert streamed(5, work._replace(sharing=1)) == pytest.approx(3 * 64)


def test_tiles_that_share_tokens_are_cut_to_run_at_once() -> None:
    latent = Load(4, 32, 65536, 512, 1152, 32, 32, slots=264, multiprocessors=132, sharing=4)
    alone = latent._replace(sharing=1)
    assert float(predict(latent, 66, 9, splits.shipped())) < 0.7 * float(
        predict(alone, 66, 9, splits.shipped())
    )
    assert choose_splits(latent).number * 4 <= 264


def test_the_merge_of_wide_heads_by_hand() -> None:
    """In a launch of its own, by as many multiprocessors as it has blocks for, and no faster than the L2."""
    work = Load(3, 16, 6400, 512, 1152, 32, 64, slots=40, multiprocessors=20, merging=3 * 16 * 8)
    partials = 3 * 10 * 16 * 514 * 4 / 1e6
    assert merge_time(work, 10, 10, SIMPLE) == pytest.approx(50 + 7 + 1000 / 20 * partials)
    few = work._replace(merging=12)
    assert merge_time(few, 10, 10, SIMPLE) == pytest.approx(50 + 7 + 1000 / 12 * partials)
    slow = SIMPLE._replace(l2_megabyte=100)
    assert merge_time(work, 10, 10, slow) == pytest.approx(50 + 7 + 100 * partials)
    assert merge_time(work, 1, 1, SIMPLE) == 0
    bare = predict(work, 10, 10, SIMPLE._replace(next_launch=0, level=0, merged_megabyte=0, l2_megabyte=1e-9))
    whole = predict(work, 10, 10, SIMPLE._replace(l2_megabyte=1e-9))
    assert whole - bare == pytest.approx(float(merge_time(work, 10, 10, SIMPLE)))


@pytest.mark.parametrize("number", [None, 2, 132, 256])
def test_a_launch_of_its_own_merges_all_splits_at_once(number: int | None) -> None:
    latent = Load(1, 16, 65536, 512, 1152, 32, 32, slots=264, multiprocessors=132, merging=128)
    chosen = choose_splits(latent, number)
    assert chosen.fan == chosen.number
    assert chosen.number == number or (number is None and chosen.number >= 132)
    assert choose_splits(latent._replace(merging=0), 132).fan < 132  # for one block that is too much at once


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


def test_the_shipped_constants_say_where_they_come_from() -> None:
    from importlib import resources

    text = resources.files(splits.__package__).joinpath(splits.CONSTANTS_FILE).read_text()
    facts = json.loads(text)
    assert set(facts) == {"source", "device", "date", "microseconds"}
    assert (facts["device"] is None) == (facts["source"] == "estimated, not measured")
    assert (facts["date"] is None) == (facts["device"] is None)
    assert set(facts["microseconds"]) == set(Constants._fields)
    assert splits.shipped() == Constants(**facts["microseconds"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting"),
        ("[]", "list indices"),
        ('{"microseconds": {}}', "missing"),
        (json.dumps({"microseconds": {**SIMPLE._asdict(), "wave": 0}}), "each must be above 0"),
        (json.dumps({"microseconds": {**SIMPLE._asdict(), "wave": "x"}}), "could not convert"),
        (json.dumps({"microseconds": {**SIMPLE._asdict(), "more": 1}}), "unexpected"),
        (json.dumps({"microseconds": SIMPLE._asdict()}).replace("100,", "NaN,"), "each must be above 0"),
    ],
)
def test_a_broken_file_of_constants_is_refused(
    tmp_path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    (tmp_path / splits.CONSTANTS_FILE).write_text(text)
    monkeypatch.setattr(splits.resources, "files", lambda _: tmp_path)
    with pytest.raises(BackendError, match=f"{splits.CONSTANTS_FILE}.*{said}.*reinstall treeattn"):
        splits.shipped.__wrapped__()


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
