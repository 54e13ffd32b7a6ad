"""What went from the package is named nowhere but where history stands: CHANGELOG and decisions.

A line of tests/data/removed_names.txt is ``command NAME``, ``option COMMAND --NAME``, or a dotted module.
"""

import re
import subprocess
from pathlib import Path

import pytest

from treeattn.cli import commands

ROOT = Path(__file__).resolve().parents[2]
LIST = "tests/data/removed_names.txt"
HISTORY = ("CHANGELOG.md", "docs/decisions/", LIST)
REMOVED = sorted(set((ROOT / LIST).read_text().splitlines()))


def texts():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode:
        pytest.skip("not a checkout: git names the files")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if not name.startswith(HISTORY) and path.is_file() and not path.is_symlink():
            text = path.read_bytes()
            if b"\0" not in text:
                yield name, text.decode()


def pattern(line):
    """What would name it: a call of the command, the option in such a call, the module's dots or its path."""
    match line.split():
        case ["command", name]:
            return rf"\btreeattn {name}\b(?! =|-)"
        case ["option", command, option]:
            return rf"\btreeattn {command}\b[^`\n]* {option}\b(?!-)"
        case [module]:
            path = module.removeprefix("treeattn.").replace(".", "/")
            return rf"\b{re.escape(module)}\b|\b{path}\.py\b"


@pytest.mark.parametrize("line", REMOVED)
def test_what_is_removed_is_gone(line):
    match line.split():
        case ["command", name]:
            assert commands.get_command(None, name) is None
        case ["option", command, option]:
            found = commands.get_command(None, command)
            assert found is None or option not in {name for p in found.params for name in p.opts}
        case [module]:
            place = ROOT.joinpath(*module.split("."))  # not imported: its package may want an extra
            assert not [*place.parent.glob(f"{place.name}.py"), *place.glob("*.py")]


@pytest.mark.slow
def test_nothing_removed_is_named():
    """A text without the words of a name is not searched for its pattern, which takes far longer."""
    rows = [(line, set(re.findall(r"\w+", line.split()[-1].rpartition(".")[2]))) for line in REMOVED]
    named = [
        f"{name}: {line}"
        for name, text in texts()
        for held in [set(re.findall(r"\w+", text))]
        for line, words in rows
        if words <= held and re.search(pattern(line), text)
    ]
    assert not named, "\n".join(named)
