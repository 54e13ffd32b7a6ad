"""Our simulator and SimGrid's say the same of one schedule, within the bands that the documents state."""

import json
from pathlib import Path

import pytest
import second_opinion as opinion

ROOT = Path(__file__).resolve().parents[4]


def test_the_committed_results_are_within_the_bands_and_of_this_simulator():
    """Ours is computed anew: prices or rules that changed since need new results."""
    facts = json.loads((ROOT / "docs/results/second_opinion.json").read_text())
    assert facts["bands"] == [opinion.BAND_ALONE, opinion.BAND]
    assert len(facts["rows"]) >= 100
    for row in facts["rows"]:
        assert abs(row["difference"]) < (opinion.BAND if row["meet"] else opinion.BAND_ALONE), row
        assert opinion.ours(row["cluster"], row["ranks"], row["scheme"], row["bytes"] // 520).time == (
            pytest.approx(row["ours_us"])
        )
