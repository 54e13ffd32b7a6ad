"""What the first GPU is held against is predicted from the kernels and the cost model as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_committed_predictions_are_those_of_todays_kernels(tmp_path: Path) -> None:
    """If not: python benchmarks/gpu_predicted.py --json docs/results/gpu_predicted.json"""
    made = tmp_path / "gpu_predicted.json"
    command = [sys.executable, ROOT / "benchmarks" / "gpu_predicted.py", "--json", made]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    committed = ROOT / "docs" / "results" / "gpu_predicted.json"
    assert json.loads(made.read_text()) == json.loads(committed.read_text())
