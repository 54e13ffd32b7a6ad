"""Our simulator and SimGrid's say the same of one schedule, within the bands that the documents state."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def opinion():
    spec = importlib.util.spec_from_file_location("second_opinion", ROOT / "benchmarks/second_opinion.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_results_are_within_the_bands_and_of_this_simulator(opinion):
    """Ours is computed anew: prices or rules that changed since need new results."""
    facts = json.loads((ROOT / "docs/results/second_opinion.json").read_text())
    assert facts["bands"] == [opinion.BAND_ALONE, opinion.BAND]
    assert len(facts["rows"]) >= 100
    for row in facts["rows"]:
        assert abs(row["difference"]) < (opinion.BAND if row["meet"] else opinion.BAND_ALONE), row
        assert opinion.ours(row["cluster"], row["ranks"], row["scheme"], row["bytes"] // 520).time == (
            pytest.approx(row["ours_us"])
        )
