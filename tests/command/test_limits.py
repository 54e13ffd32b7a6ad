"""Where a process comes to its limits: memory of one rank, communicators of the MPI library, forks."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.torchrun import needs_torch, torchrun

from .launch import ROOT, run

PAGE = (ROOT / "docs/cache.md").read_text()
LIMITED = (
    "import os, sys; os.execvp('sh', ['sh', '-c', 'ulimit -v 1048576; exec \"$@\"', 'sh', *sys.argv[1:]])"
)


@pytest.mark.parametrize(("ranks", "code"), [(3, 0), (1, 1)])
def test_a_cache_that_exceeds_the_memory_of_one_rank(ranks, code, tmp_path):
    assert "sh -c 'ulimit -v 1048576; python -m mpi4py program.py'" in PAGE
    program = tmp_path / "program.py"
    program.write_text(re.search(r"```text\n(import numpy.*?)```", PAGE, re.DOTALL)[1])
    done = run("-c", LIMITED, sys.executable, "-m", "mpi4py", program, ranks=ranks, code=None)
    assert (done.returncode == 0) == (code == 0), done.stderr
    if code:
        assert "MemoryError: Unable to allocate" in done.stderr
    else:
        held = re.findall(r"(\d+) of 1024 MiB", done.stdout)  # ranks may print into one line
        assert held == ["341"] * 3


def test_what_the_table_of_the_page_says():
    """GB a rank, and tokens that 8 ranks have room for."""
    rows = re.findall(r"^\| \S.*?\((\d+) layers, (.*?)\) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for layers, what, cells in rows:
        heads, _, width = what.partition(" KV heads of ")
        channels = 2 * int(heads) * int(width) if width else int(heads.removeprefix("latents of "))
        token = 2 * channels * int(layers)
        kib, *gigabytes, tokens = (float(cell.replace(",", "")) for cell in cells.split("|"))
        assert kib == round(token / 1024, 1)
        assert gigabytes == [round(token * 2**20 / ranks / 1e9, 1) for ranks in (1, 8, 64)]
        assert tokens == 8 * 40 * 10**9 // token


PROGRAM = """
import treeattn
from mpi4py import MPI
taken, kept = [MPI.COMM_WORLD.Dup() for _ in range(1900)], []  # of MPICH's 2048
shape = dict(heads=1, kv_heads=1, head_dim=8, dtype="float32", scheme="{scheme}")
try:
    for _ in range(1 << 17):
        kept.append(treeattn.Decoder(**shape))
except treeattn.BackendError as error:
    if not kept[0].plan.comm.rank:
        print(len(kept), error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [pytest.param("chain", marks=pytest.mark.deep), "hierarchical"])
def test_the_last_communicator_names_the_remedy(scheme):
    done = run("-m", "mpi4py", "-c", PROGRAM.replace("{scheme}", scheme), ranks=2)
    count, message = done.stdout.split(maxsplit=1)
    assert int(count) > 10
    assert "until close()" in message
    assert message.count("\n") == 1


def test_a_fork_before_the_first_call_over_mpi():
    run("-c", "from mpi4py import MPI; from tests.support import forked; forked.before_any_call()", ranks=2)


@needs_torch
def test_no_public_verb_serves_a_fork_of_a_rank_of_torchrun():
    torchrun(Path(__file__).with_name("torchrun_fork.py"), ranks=2)
