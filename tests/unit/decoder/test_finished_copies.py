"""Which chunks a rank finishes before rounds that only copy, and when that is done."""

from __future__ import annotations

import numpy as np
import pytest

from treeattn import collectives, communicators
from treeattn.collectives import catalog
from treeattn.collectives.schedule import Schedule, Transfer
from treeattn.decoder import finished_copies


def finished(schedule, rank):
    return [chunk for chunks in finished_copies._finished(schedule, rank) for chunk in chunks]


def test_what_is_looked_at_is_finished():
    merging = (Transfer(2, 0),), (Transfer(0, 1), Transfer(1, 0))
    sent_and_overwritten = (Transfer(1, 2, merge=False), Transfer(0, 1, merge=False))
    late = Schedule("late", 3, 1, (*merging, sent_and_overwritten))
    collectives.check(late)
    assert [finished(late, rank) for rank in range(3)] == [[0], [0], []]
    passed_on = (Transfer(0, 1, merge=False),), (Transfer(1, 2, merge=False),)
    early = Schedule("early", 3, 1, (*merging, *passed_on))
    assert [finished(early, rank) for rank in range(3)] == [[0], [], []]


@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_each_chunk_is_finished_once_where_its_merges_end(size):
    for name in ("binary_tree", "reduce_scatter_gather", "ring"):
        try:
            schedule = collectives.build(name, size)
        except collectives.RestrictionError:
            continue
        assert schedule.rounds_of("copying")
        every = [chunk for rank in range(size) for chunk in finished(schedule, rank)]
        assert sorted(every) == list(range(schedule.chunks)), name


@pytest.mark.parametrize(
    ("nodes", "records", "scheme", "done"),
    [
        ([range(4)], 64, "ring", False),
        ([[0, 1], [2, 3]], 64, "ring", True),
        ([[0, 1], [2, 3]], 16, "ring", False),
        ([[0, 1], [2, 3]], 64, "hierarchical", False),  # its copies stay within a node
        ([[0, 1], [2, 3]], 64, "binary_tree", True),
        ([[0, 1], [2, 3]], 64, "recursive_doubling", False),
    ],
)
def test_it_is_done_for_enough_records_whose_copies_leave_a_node(nodes, records, scheme, done, monkeypatch):
    monkeypatch.setattr(communicators, "node_groups", lambda _: nodes)
    groups = tuple(map(tuple, nodes)) if scheme == "hierarchical" else None
    schedule = catalog.select(scheme).build(4, groups, "replicated")
    assert finished_copies.pays(None, np.empty((records, 259), np.int64), schedule) == done
