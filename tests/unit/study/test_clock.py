"""Instants of one rank on another's clock: the interpolation between two comparisons."""

from __future__ import annotations

import numpy as np

from treeattn.study.compare.clock import Offset, on_common_clock


def test_offsets_change_linearly_between_comparisons():
    before, after = Offset(1000, 5, 10_000), Offset(3000, 5, 30_000)
    instants = np.array([10_000, 20_000, 30_000], np.int64)
    assert on_common_clock(instants, before, after).tolist() == [11_000, 22_000, 33_000]


def test_no_time_between_comparisons():
    once = Offset(-7, 0, 100)
    assert on_common_clock(np.array([100, 200], np.int64), once, once).tolist() == [93, 193]


def test_nanoseconds_survive_a_long_uptime():
    year = 365 * 86_400 * 10**9
    before, after = Offset(year, 1, year), Offset(year + 2, 1, year + 10**9)
    assert on_common_clock(np.array([year + 5 * 10**8]), before, after).tolist() == [2 * year + 5 * 10**8 + 1]
