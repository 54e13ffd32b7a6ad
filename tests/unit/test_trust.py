"""Nothing that is read can run: who calls what might, by the calls themselves. And nobody else looks in."""

import ast
import functools
import os
from pathlib import Path

import pytest

from treeattn.collectives.executors import slots
from treeattn.collectives.runtime.process import Process

ROOT = Path(__file__).parents[2]
RUNS = ("pickle.", "marshal.", "shelve.", "dill.", "cloudpickle.", "torch.load", "torch.save", "yaml.")
ASKED = {"allow_pickle", "shell"}
NAMED = {"eval", "exec", "os.system", "os.popen"}


@functools.cache
def calls():
    """(file, options that are asked about, dotted name) of all calls; imported names are spelled out."""
    found = []
    for path in (path for top in ("treeattn", "collectives", "tools") for path in (ROOT / top).rglob("*.py")):
        tree = ast.parse(path.read_text())
        brought = {
            name.asname or name.name: f"{node.module}.{name.name}"
            if isinstance(node, ast.ImportFrom)
            else name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names
            if isinstance(node, ast.ImportFrom) or name.asname
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                head, dot, rest = ast.unparse(node.func).partition(".")
                given = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg in ASKED}
                found.append((path.relative_to(ROOT).as_posix(), given, brought.get(head, head) + dot + rest))
    return found


@pytest.mark.slow
def test_no_input_is_run():
    assert not {(file, name) for file, _, name in calls() if name.startswith(RUNS) or name in NAMED}


def test_arrays_are_read_without_objects():
    loads = [given for _, given, name in calls() if name == "numpy.load"]
    assert loads
    assert all(given.get("allow_pickle") == "False" for given in loads)


def test_no_shell_reads_a_command():  # but tools/parts.py the Makefile's lines
    assert {file for file, given, _ in calls() if given.get("shell", "False") != "False"} == {
        "tools/parts.py"
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_shared_memory_is_opened_by_its_user_alone(tmp_path):
    """It has no name, and who looks it up among this process's files is asked who they are."""
    named = set(os.listdir("/dev/shm"))
    offer, _ = slots._made(64, Process.of(os.getpid()))
    assert set(os.listdir("/dev/shm")) <= named
    assert slots._opened(0, offer).memory.size == 64
    child = os.fork()
    if child == 0:
        os.setresuid(12345, 12345, 12345)
        try:
            slots._opened(0, offer)
        except OSError as error:
            os._exit(13 if "Permission denied" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 13
    with pytest.raises(OSError, match="rank 0 is in another container"):  # its file has this number, too
        slots._opened(0, offer._replace(token=bytes(len(offer.token))))
    os.close(offer.descriptor)
    os.mkfifo(tmp_path / "pipe")
    pipe, empty = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), os.memfd_create("empty")
    for other in (pipe, empty):  # of the same number, in another container: neither waited for nor read
        with pytest.raises(OSError, match="rank 0 cannot be opened.*smaller than was said"):
            slots._opened(0, offer._replace(descriptor=other))
        os.close(other)
