import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeattn
from tests.support.drawn import examples
from treeattn import reference
from treeattn.attention.arguments import Rules
from treeattn.attention.mask_tables import MaskTables, all_intervals_of, intervals_of
from treeattn.attention.positions import MAX_POSITION, as_runs, check_owners
from treeattn.errors import ArgumentError

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


@pytest.mark.parametrize(
    ("given", "positions"),
    [
        ([(0, 2, 3), (9, 1, 1), (10, 1, 0)], [0, 2, 4, 9]),
        (slice(3, 9, 2), [3, 5, 7]),
        ([slice(2), slice(4, 6)], [0, 1, 4, 5]),
        (slice(5, 3), []),
        (slice(np.uint8(5), np.uint8(3)), []),
        ([(MAX_POSITION - 1, 1, 1)], [MAX_POSITION - 1]),
        ([], []),
    ],
)
def test_ways_to_say_positions(given, positions):
    runs = as_runs(given)
    assert runs.positions().tolist() == positions
    assert as_runs(runs) is runs
    assert runs == as_runs(np.array(positions, np.int64)) or len(runs.table) > 1
    assert hash(runs) == hash(as_runs(given))
    assert runs != positions


SLICE, ASCEND = "a slice needs an end, and a step above 0", "must ascend"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((given, SLICE) for given in (slice(3, None), slice(-1, 4), slice(0, 4, -1), slice(0, None))),
        ([slice(4), slice(2, None)], SLICE),
        *((np.array(given), ASCEND) for given in ([3, 3], [3, 2], [-1, 0])),
        (np.array([[1, 2]]), "positions are int64 of shape"),
        (np.array([0.5, 1]), "positions are float64 of shape"),
        *(([one], "a run is three whole numbers") for one in ((0.5, 1, 3), slice(0, 3.0))),
        *((given, ASCEND) for given in ([(4, 0, 3)], [(4, 1, 3), (6, 1, 1)])),
        *(
            (given, r"position \d+ is not served: positions are below 2\^60")
            for given in ([(MAX_POSITION, 1, 1)], np.array([0, 2**63 + 1], np.uint64), [(2**62, 1, 4)])
        ),
    ],
    ids=str,
)
def test_what_are_no_positions(given, message):
    with pytest.raises(ArgumentError, match=message):
        as_runs(given)


@examples(100)
@given(POSITIONS, st.booleans(), SIDE, SIDE, st.integers(0, 9), st.data())
def test_intervals_are_the_definition(positions, causal, left, right, leading, data):
    rules = Rules(causal=causal, window=(left, right), leading=leading)
    positions, runs = np.array(positions, np.int64), as_runs(np.array(positions, np.int64))
    valid = [data.draw(st.integers(0, len(positions))) for _ in range(2)]
    asked = np.array([[data.draw(st.integers(0, 70)) for _ in range(3)] for _ in range(2)])
    tables = MaskTables(rules, 2, 3)
    tables.update(runs, len(positions), valid, asked)
    seen = reference.seen(positions, asked, causal=causal, window=(left, right), leading=leading)
    for b in range(2):
        for i in range(3):
            first, first_end, begin, end = tables.intervals[b, i]
            assert 0 <= first <= first_end <= begin <= end <= valid[b]
            assert tuple(tables.intervals[b, i]) == intervals_of(rules, runs, valid[b], int(asked[b, i]))
            found = np.zeros(len(positions), bool)
            found[first:first_end] = found[begin:end] = True
            assert (found == (seen[b, i] & (np.arange(len(positions)) < valid[b]))).all()


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


def test_rules_are_kept_in_one_form():
    given, runs = Rules(window=(2, 0), leading=1), as_runs([0, 2, 4, 6])
    assert Rules.of(given, 2) is given
    assert tuple(all_intervals_of(given, runs, 4, np.array([6]))[0]) == intervals_of(given, runs, 4, 6)
    assert repr(runs) == "Runs([(0, 2, 4)])"
    rules = Rules(causal=np.True_, window=[None, None], leading=2**70, softcap=2, alibi=np.array([1, 2]))
    assert (rules.causal, rules.window, rules.leading, rules.alibi) == (True, None, MAX_POSITION, (1.0, 2.0))
    assert rules.causal is True
    assert Rules(window=[3, None]) == Rules(window=(3, None))
    assert rules.names == ("causal", "leading", "softcap", "alibi")
    assert [
        Rules(**given).positional for given in ({}, {"softcap": 1}, {"causal": True}, {"alibi": [1]})
    ] == [*(False, False, True, True)]
    assert [Rules(**given).by_tables for given in ({}, {"softcap": 1}, {"window": (0, 0)})] == [
        False,
        True,
        True,
    ]


DRAWN_LENGTHS = st.lists(st.integers(0, 12), min_size=2, max_size=2)


@examples(60)
@given(st.integers(1, 2), st.none() | DRAWN_LENGTHS, st.integers(0, 3), st.none() | DRAWN_LENGTHS, st.data())
def test_tables_are_the_definition(queries, lengths, drafts, begins, data):
    """Of one query and of several, which are filled in different ways."""
    rules = Rules(causal=data.draw(st.booleans()), window=(data.draw(SIDE), data.draw(SIDE)), leading=2)
    stands = data.draw(st.lists(st.integers(0, 30), min_size=queries, max_size=queries))
    stands = stands if data.draw(st.booleans()) else [stands, stands[::-1]]
    mask = np.array(
        data.draw(st.lists(st.booleans(), min_size=2 * queries * drafts, max_size=2 * queries * drafts))
    )
    mask = mask.reshape(2, queries, drafts).astype(bool)
    runs, tables = as_runs(range(1, 25, 2)), MaskTables(rules, 2, queries)
    given = 12, lengths, np.array(stands), mask, np.arange(20, 20 + drafts)
    valid = np.array([12, 12] if lengths is None else lengths) - drafts
    if (valid < 0).any():
        for refused in (lambda: tables.validate(*given, begins), lambda: tables.update(runs, *given, begins)):
            with pytest.raises(ArgumentError, match=f"must lie between {drafts}"):
                refused()
        return
    tables.validate(*given, begins)
    tables.update(runs, *given, begins)
    asked = np.broadcast_to(stands, (2, queries))
    wanted = [
        [
            intervals_of(rules, runs, int(valid[b]), int(asked[b, i]), begins[b] if begins else 0)
            for i in range(queries)
        ]
        for b in range(2)
    ]
    assert tables.intervals.tolist() == np.array(wanted).tolist()
    assert (tables.q_positions == asked).all()
    assert tables.draft_begins.tolist() == valid.tolist()
    assert (tables.drafts, tables.draft_positions.tolist()) == (drafts, [list(range(20, 20 + drafts))] * 2)
    for b, i in np.ndindex(2, queries):
        own = tables.draft_begins[b] + np.arange(drafts)
        assert (np.isin(own, tables.seen(b, i)[0]) == mask[b, i]).all()


def test_words_of_more_drafts_than_a_word_has():
    mask = np.ones((1, 1, 40), bool)
    tables = MaskTables(Rules(), 1, 1)
    tables.update(None, 50)
    assert tables.mask.shape == (1, 1, 0)
    tables.update(None, 50, mask=mask, draft_positions=np.arange(40))
    assert (tables.drafts, tables.seen(0, 0)[0].tolist()) == (40, list(range(50)))
    assert tables.mask.tolist() == [[[2**32 - 1, 2**8 - 1]]]
    tables.update(None, 70)
    assert (tables.drafts, tables.mask.shape, tables.draft_positions.shape) == (0, (1, 1, 0), (1, 0))
    assert MaskTables(Rules(), 2, 3).mask.shape == (2, 3, 0)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"lengths": [3]}, "lengths must be whole numbers of shape \\[2\\]"),
        ({"lengths": [[3, 4]]}, "lengths must be whole numbers"),
        ({"lengths": [3, 13]}, "must lie between 0"),
        ({"lengths": [-1, 3]}, "must lie between 0"),
        ({"q_positions": np.zeros(3, int)}, "q_positions have shape \\[3\\]"),
        *(
            ({"q_positions": np.zeros(n, int)}, "q_positions have shape")
            for n in ((1, 1), (2, 3), (3, 1), ())
        ),
        ({"q_positions": np.full(1, 2**60)}, "q_positions"),
        ({"q_positions": None}, "causal, leading ask for the positions of queries"),
        ({"begins": [1]}, "begins have shape \\[1\\]"),
        ({"begins": [-1, 0]}, "begins must be whole numbers from 0"),
        ({"runs": as_runs(range(11))}, "positions of 11 tokens are known, but the shard has 12"),
        ({"runs": None}, "this shard's positions are not known"),
        ({"mask": np.zeros((2, 2, 3)), "draft_positions": np.arange(3)}, "the mask is float64"),
        ({"mask": np.zeros((2, 2, 3), bool), "draft_positions": np.arange(4)}, "3 draft tokens, and draft_"),
        ({"mask": np.zeros((2, 2, 2), np.uint32)}, "the mask is uint32"),
        ({"mask": np.ones((2, 2, 13), bool)}, "13 draft tokens cannot be the last of a shard of 12"),
        ({"draft_positions": np.arange(3)}, "pass mask="),
        *(
            (
                {"mask": np.ones((2, 2, 3), bool), "draft_positions": np.zeros(shape, int)},
                "draft_positions have",
            )
            for shape in ((5, 3), (2, 1, 3))
        ),
        ({"mask": np.ones((2, 2, 3), bool), "draft_positions": np.arange(-1, 2)}, "draft_positions must be"),
    ],
)
def test_calls_that_no_table_serves(queries, call, message):
    given = {"runs": as_runs(range(12)), "tokens": 12, "q_positions": np.zeros(queries, int)} | call
    given["mask"] = given["mask"][:, :queries] if "mask" in given else None
    with pytest.raises(ArgumentError, match=message):
        MaskTables(Rules(causal=True, leading=1), 2, queries).update(**given)


def test_distances_between_far_positions_are_exact():
    """As kernels have them, in float64; from further on they are refused."""
    q, k, far = np.ones((1, 1, 1, 8), np.float32), np.zeros((1, 6, 1, 8), np.float32), 2**52 - 6
    rules = Rules(causal=True, alibi=(0.5,))
    near, away = (
        treeattn.decode(q, treeattn.Shard(k, k, positions=begin + np.arange(6)), rules=rules)[1]
        for begin in (0, far)
    )
    assert near == away
    for queries in 1, 2:
        with pytest.raises(ArgumentError, match=r"q_positions must be .* from 0 to 2\^52 under"):
            MaskTables(rules, 1, queries).update(as_runs(far + np.arange(7)), 7, None, [[far + 6] * queries])
