"""Verdicts and intervals: held to scipy, to what is known of the methods, and to made-up truths."""

import math
import random
import sys

import made_results
import numpy as np
import pytest
from scipy import stats

from treeattn.collectives import Schedule, Transfer, build
from treeattn.errors import MissingPackageError
from treeattn.study.compare.rows import NCCL_SUM, SUM
from treeattn.study.compare.summary import fewest, hodges_lehmann, holm, interval, p_value, summarise
from treeattn.study.why import counts, equal_messages, headline


def rows(times, repetitions=10, seed=2, run="made"):
    """Blocks whose common disturbance is far larger than how schemes differ."""
    drawn, found = random.Random(seed), []
    for repetition in range(repetitions):
        disturbed = math.exp(drawn.gauss(0, 1))
        for key in made_results.keys(times, tokens=[4096]):
            time = times[key.scheme] * disturbed * math.exp(drawn.gauss(0, 0.02))
            found.append(made_results.row(key, repetition, run, time_us=time))
    return found


def of(found):
    return {one["scheme"]: one for one in found}


def test_what_disturbs_a_repetition_does_not_hide_who_is_faster():
    times = {SUM: 100.0, "chain": 90.0, "ring": 110.0, "mpi_allreduce": 100.0}
    found = summarise(rows(times))
    assert [one["scheme"] for one in found] == sorted(times, key=lambda s: of(found)[s]["ratio"])
    assert {one["scheme"]: one["verdict"] for one in found} == {
        "chain": "faster", "ring": "slower", "mpi_allreduce": "not told apart", SUM: None,
    }  # fmt: skip
    for one in found:
        assert one["ratio"] == pytest.approx(times[one["scheme"]] / 100, rel=0.03)
        assert (one["baseline"], one["blocks"]) == (SUM, 10)
        if one["scheme"] != SUM:
            assert one["ratio_low"] <= one["ratio"] <= one["ratio_high"]
    named = {name: one["verdict"] for name, one in of(summarise(rows(times), "ring")).items()}
    assert named == {SUM: "faster", "chain": "faster", "mpi_allreduce": "faster", "ring": None}
    few = of(summarise(rows(times, repetitions=5)))
    assert {(one["ratio_low"], one["low_us"]) for one in few.values()} == {(None, None)}
    assert {few[name]["verdict"] for name in ("chain", "ring")} == {"not told apart"}
    assert {one["like_fastest"] for one in few.values()} == {None}  # it cannot be told


def test_which_others_may_be_the_fastest():
    """By ratios to the fastest itself: intervals of ratios to another one would overlap."""
    times = {SUM: 100.0, "chain": 50.0, "bine": 49.4, "ring": 52.0}
    found = summarise(rows(times))
    assert {one["scheme"]: one["like_fastest"] for one in found[1:]} | {found[0]["scheme"]: True} == {
        "chain": True, "bine": True, "ring": False, SUM: False,
    }  # fmt: skip


@pytest.mark.parametrize("seed", [43, 57, 60])
def test_the_fastest_and_the_baseline_have_one_verdict(seed):
    """Whichever of them the others are compared with: here the two families of tests would differ."""
    times = {SUM: 100.0, "chain": 98.0, "bine": 98.0, "ring": 140.0, "hierarchical": 130.0}
    first, *others = summarise(rows(times, seed=seed))
    assert of(others)[SUM]["like_fastest"] == (first["verdict"] == "not told apart")


def test_a_case_has_one_baseline_of_all_transports():
    """The faster of two libraries' sums, so that one scale orders all rows; peer memory has no sum."""
    found = []
    for transport, times in {
        "host": {SUM: 90.0},
        "nccl": {SUM: 30.0, "ring": 20.0},
        "peer": {"ring": 15.0},
    }.items():
        for key in made_results.keys(times, [4096], device="cuda", transport=transport):
            found += [
                made_results.row(key, at, time_us=times[key.scheme] * (1 + at / 100)) for at in range(6)
            ]
    summed = {one["label"]: (one["baseline"], round(one["ratio"], 3)) for one in summarise(found)}
    assert list(summed) == ["ring [peer]", "ring [nccl]", NCCL_SUM, f"{SUM} [host]"]
    assert summed == dict(zip(summed, [(NCCL_SUM, ratio) for ratio in (0.5, 0.667, 1, 3)], strict=True))


def test_runs_that_disagree_have_no_verdict():
    """Four times as many blocks of one run do not outvote another one."""
    first = {SUM: 100.0, "chain": 50.0, "ring": 110.0, "bine": 50.0}
    second = {SUM: 100.0, "chain": 120.0, "ring": 110.0, "bine": 99.9}
    found = of(summarise([*rows(first, 40), *rows(second, 10, run="second")]))
    assert found["chain"]["p"] < 0.05
    verdicts = {name: found[name]["verdict"] for name in ("chain", "ring", "bine")}
    assert verdicts == {"chain": "runs disagree", "ring": "slower", "bine": "faster"}
    assert {one["runs"] for one in found.values()} == {2}


def test_ratios_are_taken_within_a_run():
    """Repetition 3 of one run has nothing to do with repetition 3 of another."""
    base = [row for row in rows({SUM: 100.0}) if row.scheme == SUM]
    alone = [row for row in rows({"chain": 1.0, SUM: 1.0}, run="other") if row.scheme == "chain"]
    assert of(summarise([*base, *alone]))["chain"]["ratio"] is None


def test_fast_blocks_weigh_no_more_for_having_more_iterations():
    (key,) = made_results.keys(["chain"], [0])
    blocks = [(10.0, 200)] * 3 + [(5000.0, 3)] * 7
    found = [made_results.row(key, n, time_us=t, iterations=i) for n, (t, i) in enumerate(blocks)]
    (one,) = summarise(found)
    assert (one["time_us"], one["low_us"], one["high_us"], one["iterations"]) == (5000, 10, 5000, 3)


def test_without_scipy_there_are_medians(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    found = summarise(rows({SUM: 100.0, "chain": 90.0}), tested=False)
    assert [one["low_us"] for one in found] == [one["verdict"] for one in found] == [None, None]
    assert found[0]["time_us"] < found[1]["time_us"]
    with pytest.raises(MissingPackageError, match=r"scipy is missing .*pip install '\.\[study\]'"):
        summarise(rows({SUM: 100.0, "chain": 90.0}))


@pytest.mark.parametrize("count", [6, 9, 10, 25])
def test_an_interval_ends_where_wilcoxon_does(count):
    """Shifted beyond an end of the interval, scipy's test finds a difference; before it, none."""
    logs = np.random.default_rng(count).normal(0.1, 1, count)
    middle, low, high = hodges_lehmann(logs)
    for end, outwards in ((low, -1e-9), (high, 1e-9)):
        assert stats.wilcoxon(logs - math.log(end) - outwards).pvalue < 0.05
        assert stats.wilcoxon(logs - math.log(end) + outwards).pvalue > 0.05
    assert low < middle < high
    assert p_value(logs) == stats.wilcoxon(logs).pvalue


def test_no_difference_at_all():
    assert p_value([0.0] * 7) == p_value([0.0]) == p_value([0.5]) == 1
    assert hodges_lehmann([0.0] * 7) == (1, 1, 1)
    assert hodges_lehmann([0.5])[1:] == (None, None)


@pytest.mark.parametrize(("count", "ranks"), [(6, (1, 6)), (8, (1, 8)), (10, (2, 9)), (20, (6, 15))])
def test_the_interval_of_a_median_is_that_of_the_tables(count, ranks):
    assert interval([float(value) for value in range(count, 0, -1)]) == ranks
    assert interval([1.0] * 5) == (None, None)


def test_holm_multiplies_by_what_is_left():
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([]) == []


@pytest.mark.slow
def test_without_a_difference_at_most_one_table_in_twenty_has_a_verdict():
    """40 tables of five equal schemes: 2 expected at most; more than 7 is one chance in a thousand."""
    equal = dict.fromkeys((SUM, "chain", "ring", "binary_tree", "mpi_allreduce"), 100.0)
    told = [
        any(one["verdict"] in ("faster", "slower") for one in summarise(rows(equal, 8, seed)))
        for seed in range(40)
    ]
    assert sum(told) <= 7


@pytest.mark.parametrize(("others", "blocks"), [(1, 6), (12, 9), (25, 10), (26, 11), (51, 11)])
def test_as_few_blocks_as_can_tell_from_so_many(others, blocks):
    assert fewest(others) == blocks
    best = p_value([-1.0] * blocks)
    assert best * others <= 0.05 < 2 * best * others or blocks == 6


def test_a_job_that_sets_the_librarys_algorithm_itself_is_a_version_of_its_own():
    """But not one by --library-algorithm, whose rows have the library's choice beside it."""
    key, command = made_results.keys([SUM], [0])[0], "treeattn compare"
    set_by = {"environment": {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "ring", "UCX_TLS": "tcp"}}
    one, other = (made_results.row(key, run=run, command=command) for run in "ab")
    alone = made_results.row(key, run="c", command=command, **set_by)
    asked = made_results.row(key, run="d", command=f"{command} --library-algorithm ring", **set_by)
    found = summarise([one, alone, other, asked])
    assert [row["runs"] for row in found] == [3, 1]
    assert [row["case"] for row in found] == [key.words, f"{key.words}, {next(iter(*set_by.values()))}=ring"]


NODES = ((0, 1), (2, 3))
#: Of 4 ranks on 2 nodes: up within the nodes, across, and back.
UP = (Transfer(1, 0), Transfer(3, 2))
ACROSS = (Transfer(0, 2), Transfer(2, 0))
BACK = (Transfer(0, 1, merge=False), Transfer(2, 3, merge=False))


def test_counts_by_hand():
    found = counts(Schedule("made", 4, 1, (UP, ACROSS, BACK)), NODES, records=3, record_bytes=10)
    assert found.pop("sends")
    assert found == {
        "rounds": 3, "rounds_inter": 1, "busiest_bytes": 30,
        "messages_intra": 4, "bytes_intra": 120, "messages_inter": 2, "bytes_inter": 60,
    }  # fmt: skip
    doubling = counts(build("recursive_doubling", 4), NODES, 3, 10)
    assert (doubling["rounds_inter"], doubling["busiest_bytes"]) == (1, 60)  # both ranks of a node send
    alone = counts(build("chain", 4), ((0, 1, 2, 3),), 3, 10)
    assert (alone["rounds_inter"], alone["messages_inter"]) == (0, 0)
    assert alone["busiest_bytes"] == 60  # a rank within the chain takes the sum, and later the result


def row(label, like_fastest, schedule=None):
    counted = {} if schedule is None else counts(schedule, NODES, 4, 10)
    return {"label": label, "like_fastest": like_fastest, **counted}


def test_a_headline_names_what_is_less_than_of_the_next_that_can_be_told_apart():
    ours, ring = Schedule("made", 4, 1, (UP, ACROSS, BACK)), build("ring", 4)
    first, sum_ = row("made", None, ours), row("SUM", False)
    rows = [first, row("chain", True, build("chain", 4)), sum_, row("ring", False, ring)]
    assert headline("made", "0.38 of SUM (0.28 to 0.49)", rows) == (
        "fastest here: made, 0.38 of SUM (0.28 to 0.49); cannot be told apart from chain; because, ring in "
        "brackets: rounds between nodes 1 (6), messages between nodes 2 (12), bytes on the busiest link "
        "40 (60), rounds 3 (6), messages within nodes 4 (12)"
    )
    assert headline("made", "1 µs", [first, sum_]) == "fastest here: made, 1 µs"  # a library tells nothing
    assert headline("SUM", "2", [sum_, row("ring", False, ring)], True) == (
        "fastest here: SUM (each rank ends with its heads alone), 2"
    )
    assert headline("ring", "1", [row("ring", None, ring), row("made", False, ours)]).endswith(
        "; not for what it sends: made has no more rounds, nor more between nodes"
    )
    few = headline("ring", "1", [row("ring", None), row("made", None), row("SUM", None)])
    assert few == "fastest here: ring, 1; too few blocks to tell it from made, SUM"


def test_equal_messages_are_said_once():
    rows = [row("a", None, build("chain", 4)), row("b", True, build("ring", 4)), row("SUM", False)]
    assert equal_messages(rows) is None
    block, cyclic = (counts(build("ring", 4), nodes, 4, 10) for nodes in (NODES, ((0, 2), (1, 3))))
    assert equal_messages([{"label": "block", **block}, {"label": "cyclic", **cyclic}]) is None
    assert equal_messages([*rows, row("mine", True, build("chain", 4))]) == "the same messages: a = mine"
