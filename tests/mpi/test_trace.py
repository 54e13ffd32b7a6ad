"""A measured step as a trace: every rank, every round and every message of the schedule is in it."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from treeattn import communicators
from treeattn.collectives import build
from treeattn.study import trace

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("scheme", ["chain", "recursive_doubling", "reduce_scatter_gather"])
def test_all_of_the_schedule_is_in_the_trace(comm, scheme):
    schedule = build(scheme, comm.size)
    text = trace.measure(comm, schedule, heads=3, head_dim=8, queries=2, iterations=3)
    assert (text is None) == (comm.rank > 0)
    if text is None:
        return
    events = json.loads(text)["traceEvents"]
    sent = list(schedule.traffic(6, 2))
    arrows = {end: {e["id"]: e for e in events if e["ph"] == end} for end in "sf"}
    assert len(arrows["s"]) == len(arrows["f"]) == len(sent)
    for index, message in enumerate(sent):
        start, end = arrows["s"][index], arrows["f"][index]
        assert (start["tid"], end["tid"]) == (message.src, message.dst)
        assert start["ts"] < end["ts"]  # all ranks of the test read one clock
    busy = {(rank, m.round) for m in sent for rank in (m.src, m.dst)}
    slices = Counter((e["tid"], int(e["name"].split()[1][:-1]) - 1) for e in events if e["ph"] == "X")
    assert slices == dict.fromkeys(busy, 3)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")
    node = {rank: at for at, ranks in enumerate(communicators.node_groups(comm)) for rank in ranks}
    assert all(e["pid"] == node[e["tid"]] for e in events)
