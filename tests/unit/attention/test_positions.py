from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables, words_of
from treeattn.attention.positions import Runs, as_runs, check_owners
from treeattn.errors import ArgumentError
from treeattn.shards import parse_layout

POSITIONS = st.one_of(
    st.lists(st.integers(0, 60), max_size=30, unique=True).map(sorted),
    st.builds(
        lambda start, step, count: list(range(start, start + step * count, step)),
        st.integers(0, 9), st.integers(1, 4), st.integers(0, 20),
    ),
)  # fmt: skip
SIDE = st.none() | st.integers(0, 20)


@examples(100)
@given(POSITIONS)
def test_runs_are_the_positions(positions):
    runs = as_runs(np.array(positions, np.int64))
    assert runs.positions().tolist() == positions
    assert (len(runs), runs.end) == (len(positions), positions[-1] + 1 if positions else 0)
    asked = np.arange(-3, 130)
    below = [sum(position < t for position in positions) for t in asked]
    assert [runs.below(int(t)) for t in asked] == below
    assert runs.all_below(asked).tolist() == below


def test_blocks_with_gaps_are_a_run_each():
    blocks = np.concatenate([np.arange(start, start + 32) for start in (0, 32, 256, 384)])
    assert as_runs(blocks).table[:, 1:].tolist() == [[0, 1, 64], [256, 1, 32], [384, 1, 32]]


def seen(rules: Rules, positions: np.ndarray, valid: int, t: int) -> np.ndarray:
    """The definition, token by token."""
    s = positions
    inside = np.ones(len(s), bool)
    if rules.left is not None:
        inside &= s >= t - rules.left
    if rules.right is not None:
        inside &= s <= t + rules.right
    causal = s <= t if rules.causal else np.ones(len(s), bool)
    return causal & (inside | (s < rules.leading)) & (np.arange(len(s)) < valid)


@examples(100)
@given(POSITIONS, st.booleans(), SIDE, SIDE, st.integers(0, 9), st.data())
def test_intervals_are_the_definition(positions, causal, left, right, leading, data):
    rules = Rules(causal=causal, window=(left, right), leading=leading)
    positions, runs = np.array(positions, np.int64), as_runs(np.array(positions, np.int64))
    valid = [data.draw(st.integers(0, len(positions))) for _ in range(2)]
    asked = np.array([[data.draw(st.integers(0, 70)) for _ in range(3)] for _ in range(2)])
    tables = MaskTables(rules, 2, 3)
    tables.update(runs, len(positions), valid, asked)
    for b in range(2):
        for i in range(3):
            first, first_end, begin, end = tables.intervals[b, i]
            assert 0 <= first <= first_end <= begin <= end <= valid[b]
            assert tuple(tables.intervals[b, i]) == rules.intervals(runs, valid[b], int(asked[b, i]))
            found = np.zeros(len(positions), bool)
            found[first:first_end] = found[begin:end] = True
            assert (found == seen(rules, positions, valid[b], int(asked[b, i]))).all()


@pytest.mark.parametrize("layout", ["contiguous", "interleaved", "zigzag"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_layouts_are_few_runs_and_nobody_claims_twice(layout, size):
    everyone = [as_runs(parse_layout(layout).runs(41, rank, size)) for rank in range(size)]
    assert max(len(runs.table) for runs in everyone) <= 2
    assert sorted(np.concatenate([runs.positions() for runs in everyone]).tolist()) == list(range(41))
    check_owners(everyone)


@examples(100)
@given(POSITIONS, POSITIONS)
def test_a_position_of_two_ranks_is_found(ours, theirs):
    everyone = [as_runs(np.array(positions, np.int64)) for positions in (ours, theirs)]
    both = sorted(set(ours) & set(theirs))
    if not both:
        check_owners(everyone)
        return
    with pytest.raises(ArgumentError, match="ranks 0 and 1 both claim position") as raised:
        check_owners(everyone)
    assert int(str(raised.value).split()[-1]) in both


@pytest.mark.parametrize(
    "positions",
    [
        *([3, 3], [3, 2], [-1, 0], [[1, 2]], [0.5, 1], [(4, 0, 3)], [(0.5, 1, 3)]),
        *([(4, 1, 3), (6, 1, 1)], slice(0, None)),
    ],
)
def test_what_does_not_ascend_is_refused(positions):
    with pytest.raises(ArgumentError):
        as_runs(
            positions
            if not isinstance(positions, list) or isinstance(positions[0], tuple)
            else np.array(positions)
        )


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"window": (-1, 0)}, "a side of the window must be a whole number from 0 on, not -1"),
        ({"window": 5}, "window must be"),
        ({"leading": -2}, "leading must be a whole number"),
        ({"softcap": 0}, "softcap must be a number of float32 above 0"),
        ({"softcap": 1e300}, "softcap must be"),
        ({"softcap": 1e-300}, "softcap must be"),
        ({"sink_logits": [0.0, 1e300]}, "sink_logits must be finite"),
        ({"alibi": [0.0, -np.inf]}, "alibi must be finite numbers of float32"),
        ({"alibi": [1.0]}, "alibi has shape \\[1\\]: one number for each of 2 heads"),
        ({"sink_logits": [0.0, np.nan]}, "sink_logits must be finite numbers of float32, or -inf"),
        ({"causal": 2}, "causal must be True or False"),
    ],
)
def test_bad_rules(rules, message):
    with pytest.raises(ArgumentError, match=message):
        Rules.of(Rules(**rules), 2)


def test_words_of_a_mask():
    mask = np.zeros((1, 1, 40), bool)
    mask[0, 0, [0, 5, 33]] = True
    assert words_of(mask).tolist() == [[[0b100001, 0b10]]]


def test_drafts_are_the_last_valid_tokens():
    tables = MaskTables(Rules(causal=True), 2, 1)
    tables.update(Runs([(0, 1, 10)]), 12, [9, 12], [[8], [9]], mask=np.ones((2, 1, 3), bool))
    assert tables.draft_begins.tolist() == [6, 9]
    assert tables.intervals[:, 0, 3].tolist() == [6, 9]
    with pytest.raises(ArgumentError, match="must lie between 3"):
        tables.update(Runs([(0, 1, 10)]), 12, [2, 12], [[8], [9]], mask=np.ones((2, 1, 3), bool))


@pytest.mark.parametrize(
    ("mask", "draft_positions"),
    [
        (np.zeros((2, 1, 3), np.int64), None),
        (np.zeros((1, 1, 3), bool), None),
        (np.zeros((2, 1, 3), bool), np.arange(4)),
        (np.full((2, 1, 1), 8, np.uint32), np.arange(3)),
        (np.zeros((2, 1, 2), np.uint32), np.arange(3)),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask, draft_positions):
    tables = MaskTables(Rules(), 2, 1)
    with pytest.raises(ArgumentError, match="the mask"):
        tables.update(None, 12, None, None, mask=mask, draft_positions=draft_positions)
