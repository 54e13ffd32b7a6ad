"""Token trees over the job's ranks: what one rank decides for all, and what all compute together."""

from __future__ import annotations

import numpy as np
import pytest

from treeattn.errors import ArgumentError
from treeattn.token_tree import TokenTree, accept_greedy, accept_sample, accept_speculative

pytestmark = pytest.mark.mpi

TREE = TokenTree.from_beams(np.array([[[0, 1, 2], [0, 2, 3]], [[0, 3, 1], [0, 3, 2]]]))


def test_rank_0_decides_for_all(comm):
    """The others hold other numbers, or nothing that could be judged."""
    p = np.random.default_rng(comm.rank).dirichlet(np.ones(4), TREE.tokens.shape)
    q = np.random.default_rng(99).dirichlet(np.ones(4), TREE.tokens.shape)
    targets = p.argmax(-1) if comm.rank == 0 else None
    generator = np.random.default_rng(comm.rank) if comm.rank == 0 else None
    for accepted in (
        accept_greedy(TREE, targets, comm=comm),
        accept_sample(TREE, p, generator, comm=comm),
        accept_speculative(TREE, p, q, generator, comm=comm),
    ):
        everyone = comm.allgather([array.tolist() for array in accepted])
        assert everyone == [everyone[0]] * comm.size
        for row, count in enumerate(accepted.counts):
            TREE.check_path(row, accepted.path[row, :count])


def test_what_rank_0_cannot_judge_every_rank_raises(comm):
    targets = np.zeros((2, 3), int) if comm.rank == 0 else np.zeros(TREE.tokens.shape, int)
    with pytest.raises(ArgumentError, match=r"integers \[2, 5\] are needed"):
        accept_greedy(TREE, targets, comm=comm)
