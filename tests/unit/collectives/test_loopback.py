"""Schedules run on numbers: against a direct merge, to the bit where it is exact, in the order stated."""

from dataclasses import replace

import numpy as np
import pytest
from catalog_variants import VARIANTS, built
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from tests.support.partials import partials as ranks
from tests.support.schedules import schedules
from treeattn.backends import cpu
from treeattn.collectives import Schedule, Transfer, build, check, names
from treeattn.collectives.executors import loopback
from treeattn.errors import ArgumentError, ScheduleError


class Words:
    """Writes down the order of the merges; not commutative on purpose."""

    dtype, width = np.dtype(object), 1

    def merge(self, into, other):
        into[:] = "(" + into + other + ")"

    def planned_merge(self, into, other):
        return lambda: self.merge(into, other)


EXACT = cpu.MergeOperator(3, np.float64)


def exact(size, records):
    return [one.astype(np.float64) for one in ranks(size, records, 3)]


def direct_merge(partials):
    stacked = np.stack(partials).astype(np.float64)
    maximum = stacked[..., :1].max(axis=0)
    weights = np.exp(stacked[..., :1] - np.where(np.isinf(maximum), 0, maximum))
    return np.concatenate([maximum, (weights * stacked[..., 1:]).sum(axis=0)], axis=1)


def gathered(schedule, results):
    """One full result: of rank 0, or the chunks of all ranks; the same bits where several have it."""
    if schedule.result == "replicated" and check(schedule).determinism != "none":
        assert {result.tobytes() for result in results} == {results[0].tobytes()}
    return np.concatenate(results) if schedule.result == "scattered" else results[0]


# Executors know no scheme: all of the catalogue in all forms, and any other that is right.
SCHEDULES = st.one_of(st.builds(built, st.sampled_from(VARIANTS), st.integers(1, 17)), schedules())
SEEDS = st.integers(0, 999)


@given(SCHEDULES, st.integers(0, 24), SEEDS)
@examples(100)
def test_it_is_the_direct_merge(schedule, records, seed):
    """With the same bits on every rank; also of fewer records than chunks. The partials stay as they are."""
    for dtype, tolerance in ((np.float64, 1e-13), (np.float32, 1e-5)):
        partials = [one.astype(dtype) for one in ranks(schedule.size, records, 3, seed)]
        expected, copies = direct_merge(partials), [partial.copy() for partial in partials]
        results = loopback.run(schedule, partials, cpu.MergeOperator(3, dtype))
        result = gathered(schedule, results)
        np.testing.assert_array_equal(result[:, 0], expected[:, 0])
        scale = np.abs(expected[:, 1:]).max(initial=1.0)
        np.testing.assert_allclose(result[:, 1:], expected[:, 1:], rtol=0, atol=tolerance * scale)
        for partial, copy, result in zip(partials, copies, results, strict=True):
            assert partial.tobytes() == copy.tobytes()
            assert not np.shares_memory(partial, result)


@given(st.sampled_from([name for name in names("schedule") if name != "head_scatter"]), st.integers(1, 13))
@examples(60)
def test_the_root_has_the_bits_of_every_rank(name, size):
    values = exact(size, 2 * size + 1)
    everywhere = loopback.run(build(name, size), values, EXACT)
    root, *others = loopback.run(build(name, size, result="root"), values, EXACT)
    assert root.tobytes() == everywhere[0].tobytes()
    assert not any(len(records) for records in others)


def words(schedule, letters="abcdefgh"):
    partials = [np.array([[letters[rank]]], dtype=object) for rank in range(schedule.size)]
    return [result[0, 0] for result in loopback.run(schedule, partials, Words())]


def test_merges_of_many_fold_from_the_lowest_contributor_up():
    assert words(build("all_gather_merge", 4)) == ["(((ab)c)d)"] * 4
    assert words(build("k_nomial_tree", 6, radix=3)) == ["(((ab)c)((de)f))"] * 6


def test_transfers_read_the_state_before_the_round():
    # In one round, a passes on to b while b passes on to c: c must get the b of before.
    pass_on = (Transfer(0, 1), Transfer(1, 2))
    finish = (Transfer(0, 2),)
    copies = tuple(Transfer(2, rank, range(1), False) for rank in (0, 1))
    assert words(Schedule("pass_on", 3, 1, (pass_on, finish, copies))) == ["(a(bc))"] * 3


def test_partials_that_do_not_fit_are_refused():
    schedule, partials = build("chain", 3), exact(3, 4)
    with pytest.raises(ArgumentError, match="chain is for 3 ranks, but there are 2 partials"):
        loopback.run(schedule, partials[:2], EXACT)
    with pytest.raises(
        ArgumentError, match=r"partial of rank 1 is float64 \[3, 5\], the reduction needs float64 \[4, 5\]"
    ):
        loopback.run(schedule, [partials[0], partials[1][:3], partials[2]], EXACT)
    with pytest.raises(ArgumentError, match="partial of rank 0 is float64"):
        loopback.run(schedule, partials, cpu.MergeOperator(3))


def test_a_schedule_that_does_not_check_does_not_run():
    schedule = build("chain", 3)
    with pytest.raises(ScheduleError, match="lacks rank 2"):
        loopback.run(replace(schedule, rounds=schedule.rounds[1:]), exact(3, 4), EXACT)
