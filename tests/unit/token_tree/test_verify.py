"""What verification costs beside its results, in one process; tests/mpi/test_token_tree.py has those."""

import tracemalloc

import numpy as np
import pytest

from tests.support.refusals import refused
from treeattn.backends import cpu
from treeattn.mpi import communicators
from treeattn.token_tree import TokenTree, Verifier
from treeattn.token_tree.owners import OWNERS, draft_owners

TREE = TokenTree.from_beams(np.random.default_rng(0).integers(0, 2, (2, 4, 4)))


@pytest.mark.skipif(cpu.compiled_kernels_problem() is not None, reason="no compiler")
def test_a_step_allocates_nothing():
    """A few small objects of the interpreter: far less than its records, whatever the context."""
    draw, nodes = np.random.default_rng(0), TREE.nodes
    q = draw.random((2, nodes, 8, 64), np.float32)
    draft_k, draft_v = draw.random((2, 2, nodes, 2, 64), np.float32)
    k, v = draw.random((2, 2, 3000, 2, 64), np.float32)
    lengths, shards = np.array([3000, 2000]), np.array([[3000, 2000]])
    plan = {"heads": 8, "kv_heads": 2, "head_dim": 64, "batch": 2, "dtype": "float32"}
    with Verifier(communicators.world(), nodes=nodes, **plan) as verifier:
        for _ in range(3):
            verifier(q, k, v, draft_k, draft_v, TREE, lengths, shard_lengths=shards)
        tracemalloc.start()
        verifier(q, k, v, draft_k, draft_v, TREE, lengths, shard_lengths=shards)
        left, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert left < 2_000
    assert most < verifier.decoder.records.nbytes / 4


def test_every_draft_has_one_owner_that_is_known():
    lengths = np.array([[5, 1], [2, 1], [2, 0]])
    assert (draft_owners("single", TREE, 3, lengths) == [[1], [2]]).all()
    assert not draft_owners("single", TREE, 3).any()
    assert (draft_owners("round_robin", TREE, 3) == np.arange(TREE.nodes) % 3).all()
    wanted = (np.array([[9], [2]]) + TREE.depths) % 3
    assert (draft_owners("position", TREE, 3, lengths) == wanted).all()
    for owner in OWNERS:
        ranks = draft_owners(owner, TREE, 3, lengths)
        assert ranks.shape == TREE.tokens.shape
        assert set(np.unique(ranks)) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("owner", "lengths", "words"),
    [
        ("everyone", None, "use one of single, position, round_robin"),
        ("position", None, "pass shard_lengths="),
        ("single", np.zeros((2, 2), int), "[ranks, batch] = [3, 2]"),
        (np.full(TREE.tokens.shape, 3), None, "ranks from 0 to 2"),
        (np.zeros(TREE.tokens.shape), None, "owner is float64"),
        ([0, 1], None, "one for each of"),
    ],
)
def test_owners_that_are_none(owner, lengths, words):
    with refused(words):
        draft_owners(owner, TREE, 3, lengths)
