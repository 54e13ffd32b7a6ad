"""Instants of one rank on another's clock: the interpolation between two comparisons."""

from __future__ import annotations

import numpy as np

from treeattn.study.compare.clock import Offset, on_common_clock


def test_offsets_change_linearly_between_comparisons():
    before, after = Offset(1000, 5, 10_000), Offset(3000, 5, 30_000)
    instants = np.array([10_000, 20_000, 30_000], np.int64)
    assert on_common_clock(instants, before, after).tolist() == [11_000, 22_000, 33_000]
