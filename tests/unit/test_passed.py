"""What the gate leaves out: whether it passed with the files as they are, and which of it is made."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tools import passed as tool

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = """
quick slow:
	@touch $@.made
	@[ $@ = quick ] || sleep 600
broken:
	@exit 3
stubborn:
	@trap '' TERM; sleep 600
killed:
	@kill -KILL $$PPID
"""


@pytest.fixture
def passed(tmp_path, monkeypatch):
    """The tool over a small tree: three targets that depend on one package, or on a part of it."""
    (tmp_path / "package/apart").mkdir(parents=True)
    (tmp_path / "package/apart/other.py").write_text("1")
    (tmp_path / "package/code.py").write_text("2")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    for name in tool.CHOOSE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "RECORD", tmp_path / "passed.json")
    parts = ("package", "nowhere", "!package/apart", "!nothing")
    monkeypatch.setattr(tool, "TARGETS", {"slow": ("package",), "quick": parts, "broken": parts})
    return tool


def noted(*targets, seconds=0):
    for target in targets:
        tool.note(target, int(time.time()) + 1)
    entries = {name: entry | {"seconds": seconds} for name, entry in tool.record().items()}
    tool.RECORD.write_text(json.dumps(entries))


def test_a_record_holds_until_a_file_changes_comes_or_goes(passed, tmp_path):
    code, new = tmp_path / "package/code.py", tmp_path / "package/new.py"
    assert not passed.passed("quick")
    noted("quick", "slow")
    assert passed.passed("quick")
    for change in (lambda: code.write_text("3"), lambda: new.write_text(""), code.unlink):
        change()
        assert not passed.passed("quick")
        noted("quick")
        assert passed.passed("quick")
    assert not passed.passed("slow")
    (tmp_path / "package/__pycache__").mkdir()  # what Python compiles is no file of a target
    (tmp_path / "package/__pycache__/code.pyc").write_text("3")
    assert passed.passed("quick")
    (tmp_path / "package/apart/other.py").write_text("3")  # nor is a part that it leaves out
    assert passed.passed("quick")


def test_nothing_is_noted_that_was_edited_meanwhile(passed, tmp_path):
    begin = int(time.time())
    os.utime(tmp_path / "package/code.py", (begin + 5, begin + 5))
    assert "changed since it began: package/code.py" in passed.note("quick", begin)
    assert not passed.passed("quick")


def test_what_is_due_is_made_while_time_is_left(passed, tmp_path, capsys):
    """Known ones first: `slow` is cut off, and nothing is left for `quick`."""
    noted("broken", "slow")
    (tmp_path / "package/apart/other.py").write_text("3")
    assert passed.make_due(2) == 0
    assert [line.split(",")[0] for line in said(capsys)] == ["left: slow", "left: quick"]
    assert passed.passed("broken")


def test_what_has_to_be_killed_is_left_too(passed, tmp_path, monkeypatch, capsys):
    """But for what was killed before its time was over, as where memory is short."""
    monkeypatch.setattr(passed, "PATIENCE", 1)
    monkeypatch.setattr(passed, "TARGETS", {"stubborn": ("package",)})
    assert passed.make_due(2) == 0
    assert said(capsys) == ["left: stubborn, not done within 1 s"]
    monkeypatch.setattr(passed, "TARGETS", {"killed": ("package",)})
    assert passed.make_due(60) == 1
    assert said(capsys) == ["FAILED: killed"]


@pytest.mark.parametrize("name", ["PYTEST_ADDOPTS", "CLUSTER_JOB", "DEVICE"])
def test_nothing_is_noted_of_which_a_part_was_chosen(passed, monkeypatch, name):
    """Of variables on make's own command line, and with -i, the Makefile does not call the tool."""
    monkeypatch.setenv(name, "--collect-only")
    assert f"not noted: {name} may" in passed.note("quick", int(time.time()) + 1)
    assert not passed.passed("quick")


def test_what_takes_longer_than_is_left_is_not_begun(passed, tmp_path, capsys):
    noted("slow", seconds=1000)
    (tmp_path / "package/code.py").write_text("3")
    assert passed.make_due(500) == 1
    assert sorted(line.split(",")[0] for line in said(capsys)) == [
        "FAILED: broken",
        "left: slow",
        "passed: quick",
    ]
    assert not (tmp_path / "slow.made").exists()


def said(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line]


def test_what_a_machine_lacks_is_named(passed, monkeypatch, capsys):
    """Links of emulated nodes are delayed by iptables: without it their tests skip, and the demo fails."""
    monkeypatch.setattr(passed, "TARGETS", {"cluster-demo": ("package",)})
    monkeypatch.setattr(passed.os, "geteuid", lambda: 0)
    monkeypatch.setattr(passed.shutil, "which", lambda name: None)
    assert passed.make_due(60) == 0
    assert capsys.readouterr().out.strip() == "left: cluster-demo, which needs iptables"
    assert "without iptables" in passed.note("cluster-demo", 0)
    assert not passed.RECORD.exists()


def test_targets_depend_on_what_their_tests_share():
    """Models, launchers and fixtures that are no test of one target."""
    for target, parts in tool.TARGETS.items():
        if any(part.startswith("tests/") for part in parts) and target != "test-kernels":
            names = {str(path.relative_to(ROOT)) for path in tool.files(target)}
            assert {"tests/conftest.py", "tests/support/tiny_models.py"} <= names, target


@pytest.mark.parametrize(
    ("words", "noted"), [((), True), (("-i",), False), (("-sk",), True), (("SIZES=1",), False)]
)
def test_when_the_makefile_notes(tmp_path, words, noted):
    """Not where a failure is passed over, or a variable may have changed what ran."""
    rule = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("noted "))
    (tmp_path / "Makefile").write_text(f"BIN := bin\n{rule}\nslow:\n\t@true\n\t$(noted)\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    asked = subprocess.run(
        ["make", "-n", *words, "slow"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert asked.returncode == 0
    assert ("passed.py --note slow" in asked.stdout) == noted


def test_every_target_of_the_table_notes_that_it_passed():
    for target in tool.TARGETS:
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert recipe is not None
        assert recipe[1].splitlines()[-1] == "\t$(noted)"
