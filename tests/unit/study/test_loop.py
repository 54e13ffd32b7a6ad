"""What is made of the instants that ranks note, each by a clock of its own."""

import numpy as np

from treeattn.study.compare.clock import Offset, on_common_clock
from treeattn.study.compare.loop import Times


def test_series_of_made_up_instants():
    """Two ranks, two iterations, two parts, by hand; nanoseconds in, microseconds out."""
    first = [[0, 1000, 4000], [10_000, 12_000, 13_000]]
    second = [[2000, 4000, 5500], [9000, 9500, 20_000]]
    samples = Times(np.array([first, second]), 0, 0.0).samples(("early", "late"))
    assert samples == {
        "completion": [5.5, 11.0],
        "after_last_entry": [3.5, 10.0],
        "early": [2.0, 2.0],
        "late": [3.0, 10.5],
    }


def test_offsets_change_linearly_between_comparisons():
    before, after = Offset(1000, 5, 10_000), Offset(3000, 5, 30_000)
    instants = np.array([10_000, 20_000, 30_000], np.int64)
    assert on_common_clock(instants, before, after).tolist() == [11_000, 22_000, 33_000]
