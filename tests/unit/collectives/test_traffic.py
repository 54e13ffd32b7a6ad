"""One counter: what it says is what the executors send, chunk by chunk, also where groups are not cut."""

from __future__ import annotations

import numpy as np
import pytest
from catalog_variants import VARIANTS, label
from fake_nccl import Fabric, QueuedOperator
from test_loopback import built

from treeattn.backends.cpu import MergeOperator
from treeattn.collectives import build
from treeattn.collectives.executors.nccl import Reducer
from treeattn.collectives.reducer import Reduction
from treeattn.collectives.traffic import messages


@pytest.mark.parametrize(("records", "group"), [(7, 1), (12, 3), (12, 12)])
@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_the_counter_counts_what_is_sent(variant, records, group):
    for size in (1, 2, 5, 8):
        schedule = built(variant, size)
        counted = [[] for _ in range(size)]
        for message in messages(schedule, records, group):
            counted[message.src].append((message.dst, message.records * 10 * 4))
        for rank, stream in enumerate(Fabric(size).streams):
            operator = QueuedOperator(MergeOperator(8), stream)
            buffer = np.zeros((records, 10), np.float32)
            reducer = Reducer(Reduction(stream, operator, buffer, group, stream), schedule)
            assert reducer.sent == counted[rank]


def test_groups_are_not_cut():
    """A ring over 8 ranks of 4 heads with 3 queries each: half of the chunks are empty and are not sent."""
    sent = list(messages(build("ring", 8), records=12, group=3))
    assert len(sent) == 56
    assert {message.records for message in sent} == {3}
    assert len(list(messages(build("ring", 8), records=12))) == 112
