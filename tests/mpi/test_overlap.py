"""A step in halves: what goes on in between, and the order of calls."""

from __future__ import annotations

import numpy as np
import pytest

import treeattn
from tests.support.problems import random_qkv
from tests.support.ranks import own_run
from treeattn.errors import StateError

pytestmark = pytest.mark.mpi

SHAPE = {"heads": 8, "kv_heads": 4, "head_dim": 16, "batch": 2, "dtype": "float32"}


def shard(comm, seed):
    q, k, v = random_qkv(37, batch=2, heads=8, kv_heads=4, head_dim=16, seed=seed)
    own = own_run(comm, 37)
    return q, np.ascontiguousarray(k[:, own]), np.ascontiguousarray(v[:, own])


def planned(comm, scheme, **options):
    return treeattn.Decoder(comm, **SHAPE, scheme=treeattn.Reduction(scheme, **options))


def test_a_step_is_finished_before_the_next(comm):
    arrays = shard(comm, 0)
    with planned(comm, "recursive_doubling") as decoder:
        with pytest.raises(StateError, match="without start"):
            decoder.test()
        decoder.begin(*arrays)
        for again in (decoder.begin, decoder.local, decoder):
            with pytest.raises(StateError, match="finish"):
                again(*arrays)
        decoder.finish()
        decoder.finish()  # divides once more
        decoder(*arrays)


# Calls of a step in parts: the states in which each may come, and the state after it (None: as before).
CALLS = {
    "local": ({"idle", "local", "folded"}, "local"),
    "reduce": ({"local"}, "folded"),
    "begin": ({"idle", "local", "folded"}, "begun"),
    "test": ({"begun"}, None),
    "finish": ({"begun", "folded"}, "folded"),
    "__call__": ({"idle", "local", "folded"}, "idle"),
}


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "hierarchical"},
        {"scheme": "hierarchical", "executor": "mpi"},
        {"scheme": "mpi_allreduce"},
        {"scheme": "kv_ring"},
        {"scheme": "binary_tree", "groups": 2},
    ],
    ids=str,
)
def test_drawn_calls_give_the_right_result_or_a_state_error(comm, options):
    """Never memory that no step wrote, nor partials that were folded twice."""
    draw, state = np.random.default_rng(13), "idle"
    steps = [shard(comm, number) for number in range(3)]
    with planned(comm, **options) as decoder:
        wanted = [[array.copy() for array in decoder(*arrays)] for arrays in steps]
        at = 0
        for _ in range(80):
            name = str(draw.choice([*CALLS]))
            allowed, following = CALLS[name]
            number = int(draw.integers(len(steps))) if name in ("local", "begin", "__call__") else at
            arrays = steps[number] if name in ("local", "begin", "__call__") else ()
            if state not in allowed:
                with pytest.raises(StateError):
                    getattr(decoder, name)(*arrays)
                continue
            given = getattr(decoder, name)(*arrays)
            at, state = number, following or state
            if name in ("finish", "__call__"):
                for ours, theirs in zip(given, wanted[at], strict=True):
                    np.testing.assert_array_equal(ours, theirs)
        if state == "begun":
            decoder.finish()


def test_a_fresh_decoder_has_no_result(comm):
    with planned(comm, "hierarchical") as decoder, pytest.raises(StateError, match="before it"):
        decoder.finish()
