"""Programs over shared memory, all ranks of a node in one process: any order of ranks gives the same bits.

Ranks go on one at a time, as far as they can, in random order, and run ahead of each other.
The order of memory is another matter: `test_memory_order.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from catalog_variants import VARIANTS, label
from test_loopback import built
from virtual_node import OneSet, steps, virtual_node

from tests.made_partials import own_part, partials
from treeattn.backends.cpu import compiled_kernels_problem
from treeattn.collectives import Schedule, Transfer, build, check
from treeattn.collectives.executors import instructions, loopback, slots

pytestmark = pytest.mark.skipif(compiled_kernels_problem() is not None, reason="no C compiler")


class Overrun(Exception):
    pass


def run_in_random_order(schedule, records, count=4, seed=0, layout=slots.Layout):
    """Every rank does `count` steps; raises `AssertionError` for wrong bits, `Overrun` for lost ones."""
    node = virtual_node(schedule, records, layout=layout)
    values = [partials(schedule.size, records, 8, seed=step) for step in range(count)]
    wanted = [loopback.run(schedule, of_step, node.operator) for of_step in values]
    go_on, draw = steps(node), np.random.default_rng(seed)
    done = [-1] * schedule.size  # steps; -1: not begun
    while min(done) < count:
        rank = draw.choice([r for r in range(schedule.size) if done[r] < count])
        for _ in range(draw.integers(1, 20)):
            buffer = node.ranks[rank].records
            if done[rank] == -1:
                done[rank] = 0
                buffer[:] = values[0][rank]
            result = go_on[rank]()
            if result == 3:
                raise Overrun
            if result:
                break
            np.testing.assert_array_equal(own_part(schedule, rank, buffer), wanted[done[rank]][rank])
            done[rank] += 1
            if done[rank] == count:
                break
            buffer[:] = values[done[rank]][rank]


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_same_bits_as_loopback(variant):
    for size, records in ((1, 3), (2, 1), (3, 16), (5, 7), (8, 9), (9, 16)):
        schedule = built(variant, size)
        if records >= check(schedule).in_step_from:
            run_in_random_order(schedule, records, seed=size)


def test_a_swap_reads_the_state_before_the_round():
    swap = (Transfer(0, 1, range(1), False), Transfer(1, 0, range(1), False))
    schedule = Schedule("swap first", 2, 1, (swap, *build("recursive_doubling", 2).rounds))
    run_in_random_order(schedule, 3)


def run_in_many_orders(*what, **how):
    for seed in range(200):
        run_in_random_order(*what, **how, seed=seed)


@pytest.mark.parametrize("scheme", ["recursive_doubling", "all_gather_merge"])
def test_one_set_of_slots_is_not_enough(scheme):
    """Else nothing above would need two. (Trees, rings and rails do with one.)"""
    with pytest.raises((Overrun, AssertionError)):
        run_in_many_orders(build(scheme, 4), 4, layout=OneSet)


@pytest.mark.parametrize(("size", "records"), [(3, 1), (5, 2), (6, 4), (8, 2)])
def test_two_sets_are_not_enough_where_results_count_nobody(size, records):
    """What the certificate is asked for: ranks without a record of their own may run ahead."""
    schedule = build("head_scatter", size)
    assert check(schedule).in_step_from == size > records
    with pytest.raises(Overrun):
        run_in_many_orders(schedule, records, count=8)


def test_nobody_writes_into_what_others_own():
    """Every address that a program writes to lies in the rank's own memory."""
    writing = {instructions.COPY, instructions.MERGE, instructions.PUBLISH}
    for name in ("recursive_multiplying:factors=3+3", "all_gather_merge", "binary_tree", "ring"):
        schedule = build(name, 9)
        node = virtual_node(schedule, 9)
        layout = slots.Layout(schedule, tuple(range(9)), 9, 40)
        begin = node.arena.block.ctypes.data
        for rank, (_, program) in enumerate(node.ranks):
            parts = [begin + sum(2 * layout.sizes[r] for r in range(other)) for other in range(9 + 1)]
            for instruction in np.concatenate(program.arrays):
                if instruction["kind"] in writing and instruction["into"] < parts[9]:
                    assert parts[rank] <= instruction["into"] < parts[rank + 1], name
