"""The shipped descriptions of Leonardo and LUMI, simulated, against what PICO measured there."""

from __future__ import annotations

import pytest

from tests.support.drawn import sample
from treeattn.collectives import build
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.placement import block
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.traffic import Payload
from treeattn.study.published.held import score
from treeattn.study.published.measurements import ELEMENT, SHIPPED, read

# Runs that a description is of: on Leonardo not those in production, on LUMI those of one group.
QUIET = {
    "leonardo": ("2025_03_28", "2025_05_06", "2025_05_10"),
    "lumi": ("2025_03_16___14_58_59", "2025_04_07___16_22_51"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("system", "percent", "rows"), sample(1, [("leonardo", 7, 25), ("lumi", 4, 24)]))
def test_simulated_times_are_near_the_measured_ones(system, percent, rows):
    """Up to 128 KiB, below the humps of 1 MiB; docs/topology.md shows these percentages."""
    cluster = description.load(system)
    errors = []
    for row in read(SHIPPED):
        quiet = row.run.name.startswith(QUIET[system]) and row.run.system == system
        long_ring = row.scheme == "ring" and row.run.ranks > 64  # minutes
        if long_ring or not (quiet and row.predicted and row.bytes <= 128 << 10):
            continue
        places = block(cluster, row.run.ranks)
        payload = Payload(row.bytes // ELEMENT, ELEMENT)
        found = simulate(build(row.scheme, row.run.ranks), cluster, places, payload).time
        errors.append(abs(found / row.microseconds - 1))
    assert len(errors) == rows
    assert round(100 * score(errors).median) == percent
    assert score(errors).p90 < 0.3
