"""A step in parts and in halves: the order of calls."""

import numpy as np
import pytest

import treeattn
from tests.support.problems import random_qkv
from tests.support.ranks import own_run
from tests.support.schemes import assert_equal
from treeattn.baselines import BASELINES
from treeattn.errors import ArgumentError, StateError

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
        {"scheme": "hierarchical", "executor": "program"},
        {"scheme": "head_scatter", "output": "heads"},
        {"scheme": "mpi_allreduce"},
        *({"scheme": name, "output": "heads" if row.scattered else None} for name, row in BASELINES.items()),
        {"scheme": "binary_tree", "groups": 2},
    ],
    ids=str,
)
def test_drawn_calls_give_the_right_result_or_a_state_error(comm, options):
    """Never memory that no step wrote, nor partials that were folded twice; every call in every state."""
    draw, state, seen = np.random.default_rng(13), "idle", set()
    options = {name: value for name, value in options.items() if value}
    shape = {"heads": 8, "kv_heads": 4, "head_dim": 16, "batch": 2}
    how, own = treeattn.Reduction(**options), own_run(comm, 37)
    drawn = [random_qkv(37, queries=3, seed=n, **shape) for n in range(3)]
    steps = [(q, k[:, own], v[:, own]) for q, k, v in drawn]
    wanted = [treeattn.decode(*arrays, comm=comm, scheme=how) for arrays in steps]
    with treeattn.Decoder(comm, **shape, queries=3, dtype="float32", scheme=how) as decoder:
        at = 0
        for _ in range(150):
            name = str(draw.choice([*CALLS]))
            allowed, following = CALLS[name]
            number = int(draw.integers(len(steps))) if name in ("local", "begin", "__call__") else at
            arrays = steps[number] if name in ("local", "begin", "__call__") else ()
            seen.add((state, name))
            if state not in allowed:
                with pytest.raises(StateError):
                    getattr(decoder, name)(*arrays)
                continue
            given = getattr(decoder, name)(*arrays)
            at, state = number, following or state
            if name in ("finish", "__call__"):
                assert_equal(given, wanted[at])
        assert len(seen) == 4 * len(CALLS)
        if state == "begun":
            decoder.finish()
        for other in (np.repeat(steps[2][0], 2, axis=1), steps[2][0][:, :1]):
            with pytest.raises(ArgumentError, match="q has shape"):
                decoder(other, *steps[2][1:])
        decoder.begin(*steps[2])  # closing ends it
