"""Where `TREEATTN_FAULTS` names a file, as `make faults` does: how long each row took is written there."""

import json
import os
from pathlib import Path

import pytest

from treeattn.study import environment


@pytest.fixture(scope="session")
def took():
    """Called with a row's name and the seconds from the fault to the end of the last process."""
    rows: dict[str, dict] = {}

    def note(name: str, seconds: float) -> None:
        row = rows.setdefault(name, {"jobs": 0, "seconds": 0.0})
        row["jobs"] += 1
        row["seconds"] = max(row["seconds"], round(seconds, 2))

    yield note
    if file := os.environ.get("TREEATTN_FAULTS"):
        facts = {"software": environment.software(), "cpu": environment.cpu_name(), "rows": rows}
        Path(file).write_text(json.dumps(facts, indent=1) + "\n")
