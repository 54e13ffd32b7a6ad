"""Where no MPI library can be loaded, all that moves no records works, and the rest says so in one line."""

from __future__ import annotations

import pytest

from tests.support.drawn import sample

from .launch import run, treeattn

# What Python runs at its start: mpi4py is there and finds no library, or is not there at all.
NO_LIBRARY = 'RuntimeError("cannot load MPI library\\nlibmpi.so: cannot open shared object file")'
NO_MPI4PY = "ModuleNotFoundError(\"No module named 'mpi4py'\", name='mpi4py')"
SITE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("mpi4py", "mpi4py.MPI")[{first}:]:
            raise {error}
sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(params=["no library", "no mpi4py"])
def without_mpi(request, tmp_path):
    """Environment variables of such a machine."""
    missing = request.param == "no library"
    (tmp_path / "sitecustomize.py").write_text(
        SITE.format(first=int(missing), error=NO_LIBRARY if missing else NO_MPI4PY)
    )
    return {"PYTHONPATH": str(tmp_path)}


SAYS = """
import contextlib, io
from treeattn.cli import _run, commands
for words in [
    "schemes", "schedule ring --ranks 3", "paper --list", "paper --ranks-free volume",
    "roofline --tokens 1k --groups 1 --dtypes float32 --repeat 1",
    "--help", *(f"{name} --help" for name in commands.list_commands(None)),
]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = _run(words.split())
    print(words, code, bool(said.getvalue()))
"""


def test_what_needs_no_mpi(without_mpi):
    done = run("-c", SAYS, **without_mpi)
    lines = done.stdout.splitlines()
    assert len(lines) > 20
    assert [line for line in lines if not line.endswith(" 0 True")] == []


def test_import(without_mpi):
    done = run("-c", "import treeattn; print(treeattn.schemes())", **without_mpi)
    assert "binary_tree" in done.stdout


def test_doctor_names_the_remedy(without_mpi):
    done = treeattn("doctor", **without_mpi, code=1)
    assert done.stderr == ""
    assert "broken" in done.stdout
    assert "pip install mp" in done.stdout


@pytest.mark.parametrize("words", sample(1, ["decode nothing.safetensors", "compare", "paper"]))
def test_what_needs_mpi_says_so(words, without_mpi):
    done = treeattn(*words.split(), **without_mpi, code=1)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("treeattn: no MPI library could be loaded (")
    assert "pip install mp" in line
