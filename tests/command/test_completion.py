"""Bash itself completes commands, options and choices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from .launch import ROOT

FOUND = {
    "sch": "schedule schemes",
    "schedule --form": "--format",
    "schedule --format h": "html",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash is at hand")
def test_bash_completes_what_is_typed(tmp_path):
    command = tmp_path / "treeattn"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m treeattn "$@"\n')
    command.chmod(0o755)
    lines = ['eval "$(_TREEATTN_COMPLETE=bash_source treeattn)"', "complete -p treeattn"]
    for words in FOUND:
        lines.append(f"COMP_WORDS=(treeattn {words}) COMP_CWORD={len(words.split())}")
        lines.append('COMPREPLY=(); _treeattn_completion treeattn; echo "${COMPREPLY[*]}"')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    registered, *found = done.stdout.splitlines()
    assert "-F _treeattn_completion" in registered
    assert found == list(FOUND.values())
