"""Nothing that is read can run: who calls what might, by the calls themselves."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Messages between ranks of one job.
ALLOWED = {
    ("treeattn/cache_nodes/message.py", "pickle.loads"),
    ("treeattn/cache_nodes/message.py", "pickle.dumps"),
}
RUNS = ("pickle.", "marshal.", "shelve.", "dill.", "cloudpickle.", "torch.load", "torch.save", "yaml.")
NAMED = {"eval", "exec", "os.system", "os.popen"}


def calls():
    """(file, call, dotted name) of the package and its tools; names imported by `from` are spelled out."""
    for path in sorted(
        path for folder in ("treeattn", "collectives", "tools") for path in (ROOT / folder).rglob("*.py")
    ):
        tree = ast.parse(path.read_text())
        brought = {
            name.asname or name.name: f"{node.module}.{name.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                head, dot, rest = ast.unparse(node.func).partition(".")
                yield path.relative_to(ROOT).as_posix(), node, brought.get(head, head) + dot + rest


def test_no_input_is_run():
    found = {(file, name) for file, _, name in calls() if name.startswith(RUNS) or name in NAMED}
    assert found == ALLOWED


def test_arrays_are_read_without_objects():
    loads = [(file, call) for file, call, name in calls() if name in ("np.load", "numpy.load")]
    assert loads
    for file, call in loads:
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given.get("allow_pickle") == "False", file


def test_no_shell_reads_a_command():
    for file, call, _ in calls():
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given.get("shell", "False") == "False" or file == "tools/parts.py", (
            file
        )  # the Makefile's lines
