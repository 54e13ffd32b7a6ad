"""Schedules run on numbers: against a direct merge, to the bit where it is exact, in the order stated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from catalog_variants import VARIANTS, at_size, label

from tests.support import verbs
from treeattn.backends import cpu
from treeattn.collectives import Schedule, Transfer, build, check, names, prove
from treeattn.collectives.executors import loopback
from treeattn.errors import ArgumentError, RestrictionError, ScheduleError


class Partials:
    """The merge of attention partials (max, denominator, numerator...), commutative to the bit."""

    def __init__(self, dtype=np.float64, width=5):
        self.dtype, self.width = np.dtype(dtype), width

    def merge(self, into, other):
        swap = other[:, :1] > into[:, :1]
        larger, smaller = np.where(swap, other, into), np.where(swap, into, other)
        equal = larger[:, :1] == smaller[:, :1]  # also both -inf, where a difference would be NaN
        factor = np.exp(np.where(equal, 0, smaller[:, :1] - np.where(equal, 0, larger[:, :1])))
        into[:, 1:] = larger[:, 1:] + factor * smaller[:, 1:]
        into[:, :1] = larger[:, :1]

    def planned_merge(self, into, other):
        return lambda: self.merge(into, other)


class Words:
    """Writes down the order of the merges; not commutative on purpose."""

    dtype, width = np.dtype(object), 1

    def merge(self, into, other):
        into[:] = "(" + into + other + ")"

    def planned_merge(self, into, other):
        return lambda: self.merge(into, other)


def random_partials(size, records, dtype=np.float64, seed=0):
    rng = np.random.default_rng([seed, size, records])
    made = []
    for _ in range(size):
        maximum = rng.normal(0, 8, (records, 1))
        denominator = rng.uniform(1, 50, (records, 1))
        numerator = rng.normal(0, 10, (records, 3))
        partial = np.concatenate([maximum, denominator, numerator], axis=1)
        partial[rng.random(records) < 0.2] = [-np.inf, 0, 0, 0, 0]  # the partial of an empty shard
        made.append(partial.astype(dtype))
    return made


def direct_merge(partials):
    stacked = np.stack(partials).astype(np.float64)
    maximum = stacked[..., :1].max(axis=0)
    weights = np.exp(stacked[..., :1] - np.where(np.isinf(maximum), 0, maximum))
    return np.concatenate([maximum, (weights * stacked[..., 1:]).sum(axis=0)], axis=1)


def built(variant, size):
    name, params = variant
    try:
        return build(name, size, **at_size(params, size))
    except RestrictionError:
        return build(name, size)


def gathered(schedule, results):
    """One full result: of rank 0, or the chunks of all ranks."""
    return results[0] if schedule.result == "replicated" else np.concatenate(results)


def assert_same_bits_everywhere(schedule, results):
    if schedule.result == "replicated":
        for result in results[1:]:
            assert result.tobytes() == results[0].tobytes()


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_a_maximum_of_minus_infinity_counts_for_nothing_whatever_is_left_over(variant):
    """On one rank, on each in turn: to the bit what the identity gives, also where no other rank is."""
    operator = cpu.MergeOperator(3)
    for size in (1, 2, 3, 5, 8):
        schedule = built(variant, size)
        for rank in range(size):
            clean = random_partials(size, 24, np.float32)
            clean[rank][:] = [-np.inf, 0, 0, 0, 0]
            soiled = [array.copy() for array in clean]
            soiled[rank][:, 1:] = np.resize([1, np.inf, np.nan, -2], (24, 1))
            for expected, got in zip(
                *(finished(loopback.run(schedule, p, operator)) for p in (clean, soiled)), strict=True
            ):
                np.testing.assert_array_equal(got, expected)


def finished(results):
    """out and lse, side by side, of every rank's records."""
    for records in results:
        out = np.empty((1, 1, len(records), 3), np.float32)
        lse = np.empty((1, len(records), 1), np.float32)
        verbs.finish(cpu, np.ascontiguousarray(records).reshape(1, -1, 1, 5), out, lse)
        yield np.concatenate((out[0, 0], lse[0]), axis=1)


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_equals_the_direct_merge_with_the_same_bits_on_every_rank(variant):
    for size in (1, 2, 3, 5, 7, 8, 12, 16, 17):
        schedule = built(variant, size)
        for dtype, tolerance in ((np.float64, 1e-13), (np.float32, 1e-5)):
            partials = random_partials(size, 24, dtype)
            results = loopback.run(schedule, partials, Partials(dtype))
            assert_same_bits_everywhere(schedule, results)
            expected = direct_merge(partials)
            np.testing.assert_array_equal(gathered(schedule, results)[:, 0], expected[:, 0])
            scale = np.abs(expected[:, 1:]).max(initial=1.0)
            np.testing.assert_allclose(
                gathered(schedule, results)[:, 1:], expected[:, 1:], rtol=0, atol=tolerance * scale
            )


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_exact_inputs_give_one_bit_pattern_in_every_scheme(variant):
    """Equal maxima and small integers: every order of merges is exact, so any difference is a defect."""
    rng = np.random.default_rng(3)
    for size in (2, 5, 8, 11):
        partials = [rng.integers(1, 100, (20, 5)).astype(np.float32) for _ in range(size)]
        for partial in partials:
            partial[:, 0] = 7
        partials[size // 2][:] = [-np.inf, 0, 0, 0, 0]
        expected = np.sum([p for i, p in enumerate(partials) if i != size // 2], axis=0)
        expected[:, 0] = 7
        schedule = built(variant, size)
        results = loopback.run(schedule, partials, Partials(np.float32))
        assert gathered(schedule, results).tobytes() == expected.tobytes()
        assert_same_bits_everywhere(schedule, results)


@pytest.mark.parametrize("name", names("schedule"))
@pytest.mark.parametrize("records", [0, 1, 2, 5])
def test_fewer_records_than_chunks(name, records):
    schedule = build(name, 7)
    partials = random_partials(7, records)
    result = gathered(schedule, loopback.run(schedule, partials, Partials()))
    assert result.shape == (records, 5)
    np.testing.assert_allclose(result, direct_merge(partials), rtol=1e-12)


@pytest.mark.parametrize("name", names("schedule"))
def test_a_rank_of_nothing_but_identities_changes_no_bit(name):
    empty = np.tile(np.array([-np.inf, 0, 0, 0, 0]), (9, 1))
    one = random_partials(1, 9)[0]
    schedule = build(name, 6)
    results = loopback.run(schedule, [empty] * 3 + [one] + [empty] * 2, Partials())
    assert gathered(schedule, results).tobytes() == one.tobytes()
    results = loopback.run(schedule, [empty] * 6, Partials())
    assert gathered(schedule, results).tobytes() == empty.tobytes()


@pytest.mark.parametrize("name", names("schedule"))
def test_the_partials_stay_as_they_are(name):
    partials = random_partials(5, 11)
    copies = [partial.copy() for partial in partials]
    results = loopback.run(build(name, 5), partials, Partials())
    for partial, copy, result in zip(partials, copies, results, strict=True):
        assert partial.tobytes() == copy.tobytes()
        assert not np.shares_memory(partial, result)


@pytest.mark.parametrize("name", [name for name in names("schedule") if name != "head_scatter"])
def test_the_root_has_the_bits_of_every_rank(name):
    for size in (1, 2, 3, 6, 8, 13):
        values = random_partials(size, 2 * size + 1)
        everywhere = loopback.run(build(name, size), values, Partials())
        root, *others = loopback.run(build(name, size, result="root"), values, Partials())
        assert root.tobytes() == everywhere[0].tobytes()
        assert not any(len(records) for records in others)


def test_a_scattered_result_is_the_own_chunk_of_each_rank():
    partials = random_partials(4, 10)
    results = loopback.run(build("head_scatter", 4), partials, Partials())
    assert [len(result) for result in results] == [2, 3, 2, 3]
    np.testing.assert_allclose(np.concatenate(results), direct_merge(partials), rtol=1e-12)


def words(schedule, letters="abcdefgh"):
    partials = [np.array([[letters[rank]]], dtype=object) for rank in range(schedule.size)]
    return [result[0, 0] for result in loopback.run(schedule, partials, Words())]


def test_merges_of_many_fold_from_the_lowest_contributor_up():
    assert words(build("all_gather_merge", 4)) == ["(((ab)c)d)"] * 4
    assert words(build("k_nomial_tree", 6, radix=3)) == ["(((ab)c)((de)f))"] * 6


def test_a_receiver_folds_its_own_value_in_its_place():
    # Rank 2 gathers: its own value is neither first nor last.
    up = tuple(Transfer(rank, 2) for rank in (3, 0, 1))
    down = tuple(Transfer(2, rank, range(1), False) for rank in (0, 1, 3))
    assert words(Schedule("gather", 4, 1, (up, down))) == ["(((ab)c)d)"] * 4


def test_transfers_read_the_state_before_the_round():
    # In one round, a passes on to b while b passes on to c: c must get the b of before.
    pass_on = (Transfer(0, 1), Transfer(1, 2))
    finish = (Transfer(0, 2),)
    copies = tuple(Transfer(2, rank, range(1), False) for rank in (0, 1))
    assert words(Schedule("pass_on", 3, 1, (pass_on, finish, copies))) == ["(a(bc))"] * 3


def test_a_copy_and_a_send_of_the_same_chunk_in_one_round():
    # Rank 1 hands on what it holds while it is overwritten.
    gather = (Transfer(1, 0), Transfer(2, 0))
    shift = (Transfer(0, 1, range(1), False),)
    both = (Transfer(1, 2, range(1), False), Transfer(0, 1, range(1), False))
    assert words(Schedule("shift", 3, 1, (gather, shift, both))) == ["((ab)c)"] * 3


def test_exact_but_classless_schedules_do_differ_between_ranks():
    """What class none warns of happens: so the class says something."""
    first = (*(Transfer(r, 3) for r in range(3)), Transfer(0, 1), Transfer(1, 0), Transfer(3, 2))
    second = (Transfer(2, 0), Transfer(2, 1), Transfer(0, 2))
    schedule = Schedule("brackets", 4, 1, (first, second))
    assert check(schedule).determinism == "none"
    results = loopback.run(schedule, random_partials(4, 200, np.float32), Partials(np.float32))
    assert results[3].tobytes() != results[0].tobytes()
    np.testing.assert_allclose(results[3], results[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [3, 4, 5, 6, 7, 8, 11, 13])
def test_census_is_exact_and_its_ranks_end_with_unlike_bits(size):
    schedule = build("census", size)
    assert check(schedule).determinism == "none"
    partials = random_partials(size, 200)
    for result in loopback.run(schedule, partials, Partials()):
        np.testing.assert_allclose(result, direct_merge(partials), rtol=1e-12, atol=1e-12)
    results = loopback.run(schedule, random_partials(size, 200, np.float32), Partials(np.float32))
    assert len({result.tobytes() for result in results}) > 1


def test_census_merges_around_the_ring():
    assert words(build("census", 3)) == ["((ab)c)", "(a(bc))", "((ac)b)"]


def test_what_is_gathered_is_kept_apart_by_chunks():
    """Rank 1 gathers the halves in two rounds, and passes both on in one."""
    first = (Transfer(1, 0, range(2)),)
    halves = ((Transfer(2, 1, range(1)),), (Transfer(2, 1, range(1, 2)),))
    rest = (Transfer(1, 0, range(2), inclusive=False),)
    down = tuple(Transfer(0, rank, range(2), False) for rank in (1, 2))
    schedule = Schedule("apart", 3, 2, (first, *halves, rest, down))
    partials = random_partials(3, 10)
    for result in loopback.run(schedule, partials, Partials()):
        np.testing.assert_allclose(result, direct_merge(partials), rtol=1e-12)


def test_the_folds_that_run_are_the_folds_that_are_stated():
    schedule = build("recursive_multiplying", 6, factors=(3, 2))
    assert [fold.sources for fold in prove(schedule).folds[0][1]] == [(0, 1, 2)]
    assert words(schedule)[0] == words(schedule)[4] == "(((ab)c)((de)f))"


def test_partials_that_do_not_fit_are_refused():
    schedule, partials = build("chain", 3), random_partials(3, 4)
    with pytest.raises(ArgumentError, match="chain is for 3 ranks, but there are 2 partials"):
        loopback.run(schedule, partials[:2], Partials())
    with pytest.raises(
        ArgumentError, match=r"partial of rank 1 is float64 \[3, 5\], the reduction needs float64 \[4, 5\]"
    ):
        loopback.run(schedule, [partials[0], partials[1][:3], partials[2]], Partials())
    with pytest.raises(ArgumentError, match="partial of rank 0 is float64"):
        loopback.run(schedule, partials, Partials(np.float32))


def test_a_schedule_that_does_not_check_does_not_run():
    schedule = build("chain", 3)
    with pytest.raises(ScheduleError, match="lacks rank 2"):
        loopback.run(replace(schedule, rounds=schedule.rounds[1:]), random_partials(3, 4), Partials())
