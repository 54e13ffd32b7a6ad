"""A step in parts, in halves and by groups of heads: the order of calls, and the bits of a whole step."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from tests.support import arguments
from tests.support.drawn import sample
from tests.support.problems import random_qkv
from tests.support.ranks import own_run
from tests.support.schemes import REPLICATED, assert_equal, copies
from treeattn import collectives
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


SCHEDULES = collectives.names("schedule")
SCHEMES = [*REPLICATED, "mpi_allreduce", "three_allreduce"]


@pytest.fixture
def shard(comm):
    """Called with a batch: q, and k and v of this rank."""

    def shard(batch, dtype=np.float32, seed=0):
        shape = {"queries": 2, "heads": 8, "kv_heads": 4, "head_dim": 16}
        q, k, v = random_qkv(61, batch=batch, dtype=dtype, seed=seed, **shape)
        own = own_run(comm, 61)
        return q, np.ascontiguousarray(k[:, own]), np.ascontiguousarray(v[:, own])

    return shard


@pytest.fixture
def planned(comm):
    """Called with a batch: a decoder of such arrays."""

    def planned(batch=1, dtype="float32", **options):
        shape = {"heads": 8, "kv_heads": 4, "head_dim": 16, "queries": 2, "batch": batch, "dtype": dtype}
        return treeattn.Decoder(comm, **arguments.plan(**shape, **options))

    return planned


@pytest.mark.parametrize(
    ("scheme", "batch"), sample(6, [(name, 1 + 2 * (at % 2)) for at, name in enumerate(SCHEMES)])
)
def test_any_number_of_groups(comm, shard, planned, scheme, batch):
    arrays = [shard(batch, seed=seed) for seed in (0, 1)]
    with planned(batch, scheme=scheme) as whole:
        wanted = [copies(whole(*some)) for some in arrays]
        sent = whole.sent
    # Whether every record is folded in the same way, whichever others travel with it.
    alike = scheme in SCHEDULES and collectives.build(scheme, comm.size).chunks == 1
    for groups in (2, 4) if batch == 1 else (2,):
        with planned(batch, scheme=scheme, groups=groups) as decoder:
            for some, results in zip((*arrays, *arrays), (*wanted, *wanted), strict=True):
                out, lse = decoder(*some)
                np.testing.assert_allclose(out, results[0], rtol=0, atol=1e-6)
                np.testing.assert_allclose(lse, results[1], rtol=0, atol=1e-6)
                if scheme in SCHEDULES:
                    digest = out.tobytes() + lse.tobytes()
                    assert comm.bcast(digest) == digest
                if alike:
                    assert_equal((out, lse), results)
            again = copies(decoder(*arrays[1]))
            assert_equal(decoder(*arrays[1], np.full(batch, arrays[1][1].shape[1])), again)
            if isinstance(sent, list) and alike:
                assert sum(size for _, size in decoder.sent) == sum(size for _, size in sent)
            elif not isinstance(sent, list):
                assert decoder.sent == sent


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_types(shard, planned, dtype):
    arrays = shard(2, ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float64)
    with planned(2, dtype) as whole:
        wanted = copies(whole(*arrays))
    with planned(2, dtype, groups=2) as decoder:
        assert_equal(decoder(*arrays), wanted)


def test_nothing_is_planned_but_the_groups(comm, shard, planned, duplicates):
    with planned(scheme="recursive_doubling", groups=2) as decoder:
        decoder(*shard(1))
    assert duplicates == [MPI.COMM_NULL] * (2 if comm.size > 1 else 0)


def test_what_cannot_be_taken_apart(shard, planned):
    for groups in (0, -1, True, "auto", 2.0):
        with pytest.raises(ArgumentError, match="groups must be a positive whole number"):
            treeattn.Reduction(groups=groups)
    with pytest.raises(ArgumentError, match="divides the 4 KV heads"):
        planned(groups=3)
    with planned(groups=2) as decoder:
        with pytest.raises(StateError, match="without arrays"):
            decoder.reduce()
        decoder(*shard(1))


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_lengths_that_cannot_be_leave_the_decoder_as_it_was(shard, planned, dtype):
    q, k, v = shard(1)
    with planned(groups=2) as decoder:
        for lengths in ([k.shape[1] + 1], [-1]):
            with pytest.raises(ArgumentError, match="must lie between 0 and the shard's"):
                decoder.local(q, k, v, np.array(lengths, dtype))
        wanted = copies(decoder(q, k, v))
        assert_equal(decoder(q, k, v, np.array([k.shape[1]], dtype)), wanted)
