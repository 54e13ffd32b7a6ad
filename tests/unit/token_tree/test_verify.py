"""What verification costs beside its results, in one process; tests/mpi/test_token_tree.py has those."""

import tracemalloc

import numpy as np
import pytest

from treeattn.backends import cpu
from treeattn.mpi import communicators
from treeattn.token_tree import TokenTree, Verifier

TREE = TokenTree.from_beams(np.random.default_rng(0).integers(0, 2, (2, 4, 4)))


@pytest.mark.skipif(cpu.compiled_kernels_problem() is not None, reason="no compiler")
def test_a_step_allocates_nothing():
    """A few small objects of the interpreter: far less than its records, whatever the context."""
    draw, nodes = np.random.default_rng(0), TREE.nodes
    q = draw.random((2, nodes, 8, 64), np.float32)
    draft_k, draft_v = draw.random((2, 2, nodes, 2, 64), np.float32)
    k, v = draw.random((2, 2, 3000, 2, 64), np.float32)
    lengths = np.array([3000, 2000])
    plan = {"heads": 8, "kv_heads": 2, "head_dim": 64, "batch": 2, "dtype": "float32"}
    with Verifier(communicators.world(), nodes=nodes, **plan) as verifier:
        for _ in range(3):
            verifier(q, k, v, draft_k, draft_v, TREE, lengths)
        tracemalloc.start()
        verifier(q, k, v, draft_k, draft_v, TREE, lengths)
        left, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert left < 2_000
    assert most < verifier.decoder.records.nbytes / 4
