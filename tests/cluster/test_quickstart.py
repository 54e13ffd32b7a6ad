"""The quickstart's commands lead to its pictures."""

import os
import re
import subprocess
import sys
from pathlib import Path

from .conftest import ROOT, SCRIPT

PAGE = ROOT / "docs/quickstart.md"


def test_the_quickstart_ends_in_its_plot(delays, tmp_path):
    """All but what installs something; `make demo` is how the environment of the tests came to be."""
    commands = "\n".join(re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    commands = re.sub(r"^(make|\.venv/bin/pip) .*\n", "", commands, flags=re.MULTILINE)
    commands = commands.replace("sudo jobs/emulated_cluster", str(SCRIPT))
    commands = commands.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    done = subprocess.run(
        ["bash", "-ec", commands], cwd=tmp_path, capture_output=True, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    named = re.findall(r"`(figures/\S+\.svg)`", PAGE.read_text())
    assert len(named) == 2
    for figure in named:
        assert "hierarchical" in (tmp_path / figure).read_text()
