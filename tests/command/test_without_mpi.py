"""Where no MPI library can be loaded, all that moves no records works, and the rest says so in one line."""

import json

import pytest

from tests.support.torchrun import needs_torch, torchrun

from .launch import ROOT, run, treeattn

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
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


SAYS = """
import json, sys
import treeattn
from tests.command.launch import in_process
from treeattn.cli import commands
for words in [
    "schemes", "schedule ring --ranks 3", "paper volume",
    "roofline --tokens 1k --groups 1 --dtypes float32 --repeat 1",
    "simulate --cluster laptop --ranks 2", "tune --cluster laptop --ranks 2",
    "check-partials tests/data/smollm2_layer17_4096.expected.safetensors",
    f"plot tests/data/compare.jsonl --figures time --out {sys.argv[1]}",
    f"report tests/data/compare.jsonl --out {sys.argv[1]}/report.html",
    "--help", *(f"{name} --help" for name in commands.list_commands(None)),
    "doctor", "decode nothing.safetensors", "compare",
]:
    done = in_process(*words.split(), code=None)
    print(json.dumps([words, done.returncode, done.stdout, done.stderr]))
print(json.dumps(["import", 0, " ".join(treeattn.schemes()), ""]))
"""


def test_all_commands(without_mpi, tmp_path):
    done = run("-c", SAYS, tmp_path, DISPLAY="", MPLBACKEND="no-such-backend", **without_mpi)
    lines = map(json.loads, done.stdout.splitlines())
    found = {words: told for words, *told in lines}
    code, out, err = found.pop("doctor")
    assert (code, err) == (1, "")
    assert "broken" in out
    assert "pip install mp" in out
    for words in ("decode nothing.safetensors", "compare"):
        code, out, err = found.pop(words)
        assert (code, out) == (1, "")
        assert_names_the_remedy(err)
    assert len(found) > 20
    assert "binary_tree" in found["import"][1]
    assert {words: told for words, told in found.items() if told[0] or not told[1]} == {}


def test_a_process_that_needs_it_says_so(without_mpi):
    done = treeattn("compare", **without_mpi, code=1)
    assert done.stdout == ""
    assert_names_the_remedy(done.stderr)


@needs_torch
@pytest.mark.parametrize("without_mpi", ["no mpi4py"], indirect=True)
def test_a_rank_of_torchrun_is_not_told_to_install_it(tmp_path, without_mpi):
    program = tmp_path / "program.py"
    program.write_text("import numpy as np, treeattn; q = np.ones((1, 1, 1, 8)); treeattn.decode(q, q, q)")
    done = torchrun(program, ranks=2, code=1, **without_mpi)
    assert "call torch.distributed.init_process_group first" in done.stderr
    assert "pip install" not in done.stderr


def assert_names_the_remedy(said):
    (line,) = said.splitlines()
    assert line.startswith("treeattn: no MPI library could be loaded (")
    assert "pip install mp" in line
