"""The walks of the pages on topology, one command after the other, as the pages have them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cluster.conftest import missing_for_delays
from treeattn.study.compare.rows import read

from .launch import ROOT, mpiexec

pytestmark = pytest.mark.deep


def walked(page, folder, **replaced):
    """What the shell lines of a page print, run in a folder that has the checkout's files."""
    commands = "\n".join(re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
    for word in ("tests", "jobs"):
        (folder / word).symlink_to(ROOT / word)
    commands = re.sub(r"\bmpiexec (?=-n)", f"{mpiexec()} ", commands)
    commands = re.sub(r"\btreeattn (?=[a-z])", f"{sys.executable} -m treeattn ", commands)
    for old, new in replaced.items():
        commands = commands.replace(old, new)
    done = subprocess.run(
        ["bash", "-ec", commands], cwd=folder, capture_output=True, text=True, timeout=1200,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return commands, done.stdout


def test_the_walk_leads_from_where_ranks_are_to_a_schedule_made_for_them(tmp_path):
    page = ROOT / "docs/topology.md"
    commands, printed = walked(page, tmp_path, **{"calibrate --out": "calibrate --seconds 2 --out"})
    steps = "doctor calibrate simulate compare plot decode tune schedule"
    for step in steps.split():
        assert f"treeattn {step}" in commands
    for picture in ("timeline.svg", "figures/predicted.svg"):
        ElementTree.parse(tmp_path / picture)
    assert "tuned@" in printed
    assert (tmp_path / "timeline.svg").read_text() == Path(ROOT / "docs/images/timeline.svg").read_text()


@pytest.mark.skipif(missing_for_delays() is not None, reason=str(missing_for_delays()))
def test_from_an_own_schedule_to_a_report_on_an_emulated_cluster(tmp_path):
    python = f"{sys.executable} jobs/emulated_cluster"
    _, printed = walked(ROOT / "docs/emulated-cluster.md", tmp_path, **{"sudo jobs/emulated_cluster": python})
    (name,) = set(re.findall(r"pairs@[0-9a-f]{6}", printed))
    found = read(tmp_path / "measured.jsonl")
    assert {row.hosts for row in found} == {"node0,node1"}
    schemes = {name, "ring", "recursive_doubling", "hierarchical"}
    assert {row.scheme for row in found if row.predicted_us} == schemes
    assert not any(row.wrong for row in found)
    text = (tmp_path / "report.html").read_text()
    for part in (f"{name} on 4 ranks", "fastest here", "verdict", "To reproduce"):
        assert part in text
    for figure in ("time.pdf", "predicted.pdf"):
        assert (tmp_path / "figures" / figure).read_bytes().startswith(b"%PDF")
