"""Many steps and openings leave nothing behind: no memory, descriptor, thread, shared memory or communicator.

`make soak` takes more of all, and writes down what a process held.
"""

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.models import write_model
from tests.support.public_verbs import OBJECTS
from treeattn import Decoder, Reduction, ShardedCache
from treeattn.cache_nodes import connect, serve
from treeattn.llama import Llama, Session
from treeattn.study import environment
from treeattn.token_tree import TokenTree, Verifier

pytestmark = pytest.mark.timeout(0)

STEPS = int(os.environ.get("TREEATTN_SOAK_STEPS", "600"))
REPORT = os.environ.get("TREEATTN_SOAK_REPORT")
GROWTH = 256 * 1024  # bytes that an allocator may still take for its own ends; a leak of a byte a step shows
# And what MPI may for each other rank: on 64 its pools took 0.8 MB in a second hundred of openings and 0.1 MB
# in a ninth.
OF_A_RANK = 64 * 1024
SHAPE = {"heads": 4, "kv_heads": 4, "head_dim": 16, "dtype": "float32"}
Q, K = np.ones((1, 1, 4, 16), np.float32), np.ones((1, 8, 4, 16), np.float32)
TREE = TokenTree.chain([[1, 2, 3]])


def held():
    """What this process has now, without what waits to be collected."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "shared": sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        "objects": sys.getallocatedblocks(),
    }


def assert_flat(comm, name, step, count, warm=1000, objects=0):
    """`step` leaves nothing behind, whatever it took to begin with. Rank 0 writes it down."""
    for _ in range(min(warm, 2 * count)):
        step()
    seen, began = [held()], time.monotonic()
    for _ in range(4):
        for _ in range(-(-count // 4)):
            step()
        seen.append(held())
    seconds = time.monotonic() - began
    if REPORT and comm.rank == 0:
        facts = {"what": name, "ranks": comm.size, "steps": count, "seconds": round(seconds, 1), "held": seen}
        with Path(REPORT).open("a") as file:
            file.write(json.dumps({**facts, "software": environment.software()}) + "\n")
    before, quarter, after = seen[0], seen[1], seen[-1]
    # What libraries take once, such as MPI for its tables, may come as late as in the first quarter.
    assert after["memory"] - quarter["memory"] <= GROWTH + comm.size * OF_A_RANK
    # Some 250 come in time, however many steps: a leak of one a step shows from 400 steps on (`make soak`).
    assert after["objects"] - before["objects"] < max(400, objects)
    for what in ("descriptors", "threads", "python_threads", "shared"):
        assert after[what] == before[what], what


@pytest.mark.parametrize("executor", ["mpi", "program", "slots"])
def test_steps_of_executors(comm, executor):
    with Decoder(comm, **SHAPE, scheme=Reduction(executor=executor)) as decoder:
        first = decoder(Q, K, K)[0].copy()
        assert_flat(comm, executor, lambda: decoder(Q, K, K), STEPS)
        np.testing.assert_array_equal(decoder(Q, K, K)[0], first)


def test_steps_of_a_cache_and_a_verifier(comm):
    cache = ShardedCache(comm, capacity=64, drafts=3, kv_heads=4, head_dim=16, dtype="float32")
    (layer,), q = cache.layers, np.ones((1, 3, 4, 16), np.float32)
    drafts = q.copy()
    with Verifier(comm, nodes=3, **SHAPE) as verifier:

        def step():
            layer.append(drafts, drafts)
            lengths = layer.shard_lengths
            verifier(q, layer.k, layer.v, drafts, drafts, TREE, layer.lengths, shard_lengths=lengths)
            layer.propose(drafts, drafts, TREE)
            layer.commit([[0, 1]])
            layer.rollback([0])

        assert_flat(comm, "cache and verifier", step, STEPS // 10, objects=STEPS // 10)


@pytest.mark.parametrize("name", ["a merger", "a prefill"])
def test_steps_of_other_verbs(comm, name):
    make, calls_of = OBJECTS[name]
    with make(comm) as made:
        assert_flat(comm, name, calls_of(made)[0], STEPS // 10, warm=100)


def test_steps_of_a_session(comm, tmp_path):
    write_model(tmp_path, "tied")
    with Session(comm, Llama(tmp_path), [1, 2, 3], capacity=9) as session:
        session.prefill()

        def step():
            session.step(4)
            session.rollback(3)

        assert_flat(comm, "session", step, STEPS // 100, warm=20, objects=STEPS // 100)


def test_steps_of_cache_nodes(comm, several):
    """In jobs of some steps each, so that what nodes hold is looked at between them."""
    each = max(20, STEPS // 10_000)

    def step():
        if comm.rank:
            serve(comm)
            return
        with connect(comm) as nodes:
            cache = nodes.cache(layers=1, kv_heads=4, head_dim=16, dtype="float32", capacity=each)
            for _ in range(each):
                cache.step(0, Q, Q, Q)

    count = max(4, STEPS // 10 // each)
    assert_flat(comm, f"cache nodes, {each} steps a job", step, count, warm=100)


@pytest.mark.parametrize("executor", ["mpi", "program", "slots"])
def test_openings(comm, executor):

    def step():
        with Decoder(comm, **SHAPE, scheme=Reduction(executor=executor)) as decoder:
            decoder(Q, K, K)

    count = max(min(100, STEPS // 30), STEPS // 100)
    assert_flat(comm, f"openings, {executor}", step, count, warm=150, objects=count)
