"""How large the project may be, counted: each number may only shrink.

An issue that adds a feature states what it takes; whoever raises a number here says why in the changelog.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from treeattn.cli import commands

ROOT = Path(__file__).resolve().parents[2]
#: Folders -> lines of Python.
LINES = {
    ("treeattn", "collectives"): 33_915,
    ("tests",): 34_644,
    ("benchmarks",): 1_964,
    ("tools",): 443,
    ("jobs",): 1_037,
}
STATEMENTS = 20_302  # of the package
WORDS = 21_997  # of docs and README
COMMANDS = 16
OPTIONS = {"compare": 16, "simulate": 14, "generate": 12}
#: What a call loads: files of ours, and their lines.
LOADED = {
    "import treeattn": (3, 130),
    "treeattn simulate --cluster laptop --ranks 4": (65, 7_680),
    "treeattn compare --help": (100, 14_600),
}

PROGRAM = """
import sys
sys.argv = sys.argv[1].split()
if sys.argv[0] == "import":
    import treeattn
else:
    from treeattn.cli import main
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        assert not end.code, end.code
files = {m.__file__ for name, m in sys.modules.items() if name.startswith("treeattn") and m.__file__}
print(len(files), sum(open(file).read().count("\\n") for file in files), file=sys.stderr)
"""


def sources(*folders: str, ending: str = ".py") -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if listed.returncode:
        pytest.skip("not a checkout: git names the files")
    paths = (ROOT / name for name in listed.stdout.splitlines() if name.endswith(ending))
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize("folders", LINES)
def test_lines(folders: tuple[str, ...]) -> None:
    assert sum(path.read_text().count("\n") for path in sources(*folders)) <= LINES[folders]


def test_statements_of_the_package() -> None:
    trees = (ast.parse(path.read_text()) for path in sources("treeattn", "collectives"))
    assert sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree)) <= STATEMENTS


def test_words_of_the_pages() -> None:
    assert sum(len(path.read_text().split()) for path in sources("docs", "README.md", ending=".md")) <= WORDS


def test_commands_and_their_options() -> None:
    context = click.Context(commands)
    assert len(commands.list_commands(context)) <= COMMANDS
    for name, most in OPTIONS.items():
        command = commands.get_command(context, name)
        assert command is not None
        assert len([param for param in command.params if isinstance(param, click.Option)]) <= most, name


@pytest.mark.parametrize("call", LOADED)
def test_what_a_call_loads(call: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, call], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files, lines = map(int, done.stderr.splitlines()[-1].split())
    most, most_lines = LOADED[call]
    assert files <= most, f"{files} files"
    assert lines <= most_lines, f"{lines} lines"
