"""Ranks that torchrun has started: no MPI anywhere."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.drawn import sample
from tests.support.torchrun import SETTINGS, needs_torch, ranks_by_environment, torchrun

from .launch import ROOT, run

pytestmark = needs_torch
HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.deep)])
def test_schedules_and_trees_of_drafts_are_those_over_mpi(ranks):
    plugins = ("-p", "no:pytest_mpi", "-p", "tests.support.torch_job", "--noconftest")
    trees = "tests/mpi/test_token_tree.py", "-k", "not allreduce"
    torchrun("-m", "pytest", *plugins, "-q", "-x", HERE / "torchrun_schedules.py", *trees, ranks=ranks)


def test_whatever_takes_a_communicator_takes_a_process_group():
    torchrun(HERE / "torchrun_verbs.py", ranks=2)
    if find_spec("transformers") is None:
        pytest.skip("all but models of transformers, which is not installed")


def test_ranks_in_no_process_group_are_told_what_to_call():
    """Each would be a job of one, and its result that of its own shard."""
    torchrun(HERE / "torchrun_alone.py", ranks=2)


def command(line, code=0):
    """What a shell of each of two ranks of torchrun makes of a line; "$@" is the command."""
    launcher = "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", 2
    words = "sh", "-c", line, "sh", sys.executable, "-m", "treeattn"
    return run(*launcher, *words, code=code, **SETTINGS)


def test_commands_below_a_shell_make_their_groups_themselves_and_print_once():
    """One after the other, each with messages and a command line of its own; one for MPI alone says so."""
    decode = f'"$@" decode {ROOT}/tests/data/smollm2_layer17_4096.safetensors'
    done = command(
        f'{decode} && {decode} --scheme ring && "$@" decode --help && "$@" doctor; exec "$@" compare', 1
    )
    lines = done.stdout.splitlines()
    assert sum("2 ranks on 1 node" in line for line in lines) == 2
    found = [line.split()[0] for line in lines if line.startswith(("recursive_doubling", "ring"))]
    assert found == ["recursive_doubling", "ring"]
    assert done.stdout.count("Usage:") == 1
    assert "2 ranks that torchrun started" in " ".join(done.stdout.split())
    assert done.stderr.count("compare takes a communicator of mpi4py: start the job with mpiexec") == 1


HUNG = """
import os, signal
import numpy as np
import torch.distributed as dist
import treeattn
dist.init_process_group("gloo")
how = treeattn.Reduction("recursive_doubling", executor=os.environ["EXECUTOR"])
shape = dict(heads=4, kv_heads=4, head_dim=16, dtype="float32", scheme=how)
decoder = treeattn.Decoder(**shape)
q, k = np.ones((1, 1, 4, 16), "f"), np.ones((1, 8, 4, 16), "f")
decoder(q, k, k)
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if os.environ["WHERE"] == "step":
    decoder(q, k, k)
treeattn.Decoder(**shape)
"""


ROUND = "recursive_doubling, round 1: "


@pytest.mark.parametrize(
    ("executor", "where", "signal", "code", "says"),
    sample(2, [
        ("torch", "step", "SIGSTOP", 124, f"{ROUND}2 s without messages from rank 1 and reception by"),
        ("torch", "step", "SIGKILL", 1, f"{ROUND}the messages with rank 1 failed"),
        ("slots", "step", "SIGSTOP", 124, f"{ROUND}2 s without messages from rank 1 and reception by"),
        ("slots", "plan", "SIGSTOP", 124, "what all ranks plan together: 2 s without the other ranks: "),
        ("slots", "step", "SIGKILL", 1, f"{ROUND}rank 1 has ended, while this one waits for "),
    ]),
)  # fmt: skip
def test_a_rank_that_is_stopped_or_dies_is_named(executor, where, signal, code, says):
    limit = "2" if code == 124 else "50"
    program = HUNG.replace("SIGSTOP", signal)
    waiting, other = ranks_by_environment(
        program, ranks=2, EXECUTOR=executor, WHERE=where, TREEATTN_TIMEOUT=limit
    )
    assert waiting.returncode == code, waiting.stderr
    if code == 1:
        last = waiting.stderr.strip().splitlines()[-1].removeprefix("[rank0]: ")
        assert last.startswith(f"treeattn.errors.PeerError: {says}"), last
        return
    (line,) = [line for line in waiting.stderr.splitlines() if line.startswith("treeattn:")]
    assert line.startswith(f"treeattn: rank 0: {says}"), line
    assert f": rank 1 is stopped (process {other.pid}); if steps take so long" in line


STRANGER = """
import os
import numpy as np
import torch.distributed as dist
import treeattn
from tests.support import strangers
dist.init_process_group("gloo")
shape = dict(heads=4, kv_heads=4, head_dim=16, dtype="float32")
decoder = treeattn.Decoder(**shape, scheme=treeattn.Reduction("recursive_doubling", executor="torch"))
q, k = np.ones((1, 1, 4, 16), "f"), np.full((1, 8, 4, 16), dist.get_rank(), "f")
before, processes, silent = decoder(q, k, k)[0].copy(), [0] * dist.get_world_size(), []
dist.all_gather_object(processes, os.getpid())
for process in processes:
    if dist.get_rank() == 0:
        assert strangers.ports(process), "none"
        silent += strangers.bother(process)
    assert np.array_equal(decoder(q, k, k)[0], before)
if dist.get_rank() == 0:
    there = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*there, is_master=False)
    keys = store.list_keys()  # by which ranks have found each other
    assert keys
    for key in keys:
        store.set(key, os.urandom(64))
assert np.array_equal(decoder(q, k, k)[0], before)
assert np.array_equal(treeattn.Decoder(**shape)(q, k, k)[0], before)
"""


def test_strangers_at_the_ports_of_ranks_and_of_the_store_change_nothing():
    for rank in ranks_by_environment(STRANGER, ranks=2):
        assert rank.returncode in (0, -9), rank.stderr  # the other is killed when the first has ended
        assert "Error" not in rank.stderr, rank.stderr
