"""Verdicts of one scheme against another: held to what is known of the methods, and to made-up truths."""

from __future__ import annotations

import io
import itertools
import math
import random
import types

import made_results
import msgspec
import pytest

from treeattn.cli.compare_table import answered, show_answers
from treeattn.report import Report
from treeattn.study.compare.answer import LOOKS, _holm, _location, _looked, _p, answers
from treeattn.study.compare.results import Results
from treeattn.study.compare.schema import NULL, SUM, Point, Run


def points(times, repetitions=10, seed=1, launch=1):
    """Blocks whose common disturbance is far larger than how schemes differ."""
    drawn, found = random.Random(seed), []
    for repetition in range(repetitions):
        disturbed = math.exp(drawn.gauss(0, 1))
        for key in made_results.keys([*times, NULL], tokens=[4096]):
            time = times.get(key.scheme, 1) * disturbed * math.exp(drawn.gauss(0, 0.02))
            samples = dict.fromkeys(("completion", "slowest", "after_last_entry"), [time] * 3)
            line = made_results.point_line(key, repetition, samples=samples) | {"launch": launch}
            found.append(msgspec.convert(line, Point))
    return found


def test_what_disturbs_a_repetition_does_not_hide_who_is_faster():
    times = {SUM: 100.0, "chain": 90.0, "ring": 110.0, "mpi_allreduce": 100.0}
    found = {one.key.scheme: one for one in answers(points(times), "completion")}
    assert {scheme: one.verdict for scheme, one in found.items()} == {
        "chain": "faster",
        "ring": "slower",
        "mpi_allreduce": "cannot be told apart",
    }
    for scheme, one in found.items():
        assert one.low <= one.ratio <= one.high
        assert one.ratio == pytest.approx(times[scheme] / 100, rel=0.03)
        assert (one.baseline, one.blocks) == (SUM, 10)
    named = {one.key.scheme: one.verdict for one in answers(points(times), "completion", "ring")}
    assert named == {SUM: "faster", "chain": "faster", "mpi_allreduce": "faster"}
    few = answers(points(times, repetitions=5), "completion")
    assert {(one.low, one.verdict) for one in few} == {(None, "cannot be told apart")}


def test_launches_that_disagree_have_no_verdict():
    """Four times as many blocks of one launch do not outvote another one."""
    first = {SUM: 100.0, "chain": 50.0, "ring": 110.0, "bine": 50.0}
    second = {SUM: 100.0, "chain": 120.0, "ring": 110.0, "bine": 99.9}
    found = answers([*points(first, 40), *points(second, 10, launch=2)], "completion")
    found = {one.key.scheme: one for one in found}
    assert found["chain"].p < 0.05
    assert (found["chain"].disagree, found["chain"].verdict) == (True, "cannot be told apart")
    assert {name: found[name].verdict for name in ("ring", "bine")} == {"ring": "slower", "bine": "faster"}
    assert {one.launches for one in found.values()} == {2}
    assert "launches disagree, one alone says the opposite of all: chain" in shown(found.values())
    assert "of one launch" in shown(answers(points(first), "completion"))


def shown(found):
    """The table of these answers, on one line."""
    rows = [types.SimpleNamespace(facts={"answer": one, "stops_early": False}) for one in found]
    made, screen = Report({}), io.StringIO()
    show_answers(made, rows)
    made.show(file=screen)
    return " ".join(screen.getvalue().split())


def test_chances_are_those_of_all_signs():
    """Of 7 values, against the 128 ways that signs can fall."""
    logs = [0.3, -0.1, 0.7, 0.2, -0.4, 0.9, 0.5]
    ranks = {value: rank for rank, value in enumerate(sorted(logs, key=abs), 1)}

    def positive(signs):
        return sum(rank for (value, rank), sign in zip(ranks.items(), signs, strict=True) if sign > 0)

    ours = positive([math.copysign(1, value) for value in ranks])
    ours = min(ours, 28 - ours)
    as_far = sum(min(w := positive(signs), 28 - w) <= ours for signs in itertools.product((-1, 1), repeat=7))
    assert _p(logs) == pytest.approx(as_far / 128)
    _, low, high = _location(logs, 0.05)
    for end, outwards in ((low, -1e-9), (high, 1e-9)):
        assert _p([value - math.log(end) - outwards for value in logs]) < 0.05
        assert _p([value - math.log(end) + outwards for value in logs]) > 0.05


def test_holm_multiplies_by_what_is_left():
    assert _holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert _holm([]) == []


def test_without_a_difference_at_most_one_table_in_twenty_has_a_verdict():
    """100 tables of five equal schemes: 5 expected at most; more than 12 is one chance in a thousand."""
    equal = dict.fromkeys((SUM, "chain", "ring", "binary_tree", "mpi_allreduce"), 100.0)
    told = [
        any(one.verdict != "cannot be told apart" for one in answers(points(equal, 8, seed), "completion"))
        for seed in range(100)
    ]
    assert sum(told) <= 12


def test_looks_are_paid_for():
    """Of 400 measurements without a difference, looked at until 128 blocks: 20 expected at most; more than 36
    is one chance in a thousand. Looks for which nothing is paid tell more than 40."""
    drawn, told, unpaid = random.Random(3), 0, 0
    for _ in range(400):
        logs = [drawn.gauss(0, 1) for _ in range(128)]
        told += _looked(logs)[2] <= 0.05
        unpaid += min(_p(logs[:look]) for look in LOOKS if look <= 128) <= 0.05
    assert told <= 36
    assert unpaid > 40


def test_blocks_end_where_the_answer_is_there():
    """One whose answer is there leaves the others; an answer does not change between two looks."""
    times = {SUM: 100.0, "chain": 50.0, "ring": 100.0}
    run = msgspec.convert(made_results.run_line(options={"stop_early": True}), Run)

    def told(repetitions, schemes=times):
        chosen = {scheme: times[scheme] for scheme in schemes}
        found = answered(Results({"made": run}, points(chosen, repetitions)), None)
        return {key.scheme for key in found}

    assert told(7) == set()
    assert told(8) == {"chain"}
    assert told(8, (SUM, "chain")) == {SUM, NULL, "chain"}
    at_8, at_15 = (answers(points(times, n), "completion", early=True) for n in (8, 15))
    assert [(one.ratio, one.low, one.blocks) for one in at_8] == [
        (one.ratio, one.low, one.blocks) for one in at_15
    ]
