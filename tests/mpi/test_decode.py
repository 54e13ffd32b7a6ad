"""The main job on real and made-up caches, at whatever size the job has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from tests.support.exporters import Dlpack, Interface, bfloat16_bits
from tests.support.problems import assert_exact, random_qkv
from tests.support.ranks import assert_same_bits, own_run
from treeattn import collectives, files, reference
from treeattn.shards import parse_layout

pytestmark = pytest.mark.mpi

DATA = Path(__file__).parent.parent / "data"
SCHEDULES = collectives.names("schedule")
REPLICATED = [name for name in SCHEDULES if collectives.build(name, 4).result == "replicated"]


def real_shard(layout: str, comm):
    """(q, this rank's k, v, scale, expected out, expected lse) of a shipped cache."""
    cache = files.open_cache(DATA / "smollm2_layer17_4096.safetensors")
    expected = files.open_cache(DATA / "smollm2_layer17_4096.expected.safetensors")
    runs = parse_layout(layout).runs(4096, comm.rank, comm.size)
    k, v = (files.load_runs(cache[name], runs) for name in "kv")
    return np.array(cache["q"]), k, v, cache.scale(), np.array(expected["out"]), np.array(expected["lse"])


def made_up(comm, **shape):
    """(q, whole k, whole v, this rank's run): the same arrays on every rank."""
    return *random_qkv(**shape), own_run(comm, shape["tokens"])


@pytest.mark.parametrize("scheme", REPLICATED)
def test_real_cache_matches_independent_expectation(comm, scheme):
    q, k, v, scale, out, lse = real_shard("contiguous", comm)
    got_out, got_lse = treeattn.decode(q, k, v, comm=comm, scheme=scheme, scale=scale)
    out_bound, lse_bound = reference.error_bounds(comm.allgather(reference.partial(q, k, v, scale=scale)))
    np.testing.assert_allclose(got_out, out, rtol=0, atol=out_bound)
    np.testing.assert_allclose(got_lse, lse, rtol=0, atol=lse_bound)
    assert_same_bits(comm, got_out, got_lse)


@pytest.mark.parametrize("layout", ["interleaved", "zigzag", "sizes"])
def test_layout_does_not_matter(comm, layout):
    if layout == "sizes":  # everything on the last rank
        layout = "sizes=" + ",".join(["0"] * (comm.size - 1) + ["4096"])
    q, k, v, scale, out, lse = real_shard(layout, comm)
    got_out, got_lse = treeattn.decode(q, k, v, comm=comm, scale=scale)
    np.testing.assert_allclose(got_out, out, rtol=0, atol=2e-5)
    np.testing.assert_allclose(got_lse, lse, rtol=0, atol=2e-5)
    assert_same_bits(comm, got_out, got_lse)


@pytest.mark.many_ranks
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("tokens", [0, 1, 3, 257])
def test_ranks_without_tokens_are_ordinary(comm, tokens, dtype):
    q, k, v, run = made_up(comm, tokens=tokens, batch=2, queries=3, heads=6, kv_heads=3, dtype=dtype)
    out, lse = treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme="recursive_doubling")
    assert out.dtype == lse.dtype == (np.float64 if dtype is np.float64 else np.float32)
    assert_exact((out, lse), q, k, v, scale=1 / 8)
    assert_same_bits(comm, out, lse)
    if tokens == 0:
        assert not out.any()
        assert (lse == -np.inf).all()


@pytest.mark.parametrize("scheme", REPLICATED)
def test_hostile_values_keep_bits_equal(comm, scheme):
    """Scores of +-1e4, a fully masked row, NaN in one head: exact where defined, the same bits everywhere."""
    q, k, v, run = made_up(comm, tokens=61, batch=2, heads=4, kv_heads=4, seed=3)
    k[:, ::7] *= 3e3
    lengths = np.array([61, 0])
    layout = parse_layout("contiguous")
    shard_lengths = layout.shard_lengths(lengths, 61, comm.rank, comm.size)
    v[0, 60, 2, 5] = np.nan
    out, lse = treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=scheme, lengths=shard_lengths)
    assert np.isnan(out[0, 0, 2]).any()
    whole = [0, 1, 3]
    got, clean = (out[:, :, whole], lse[:, whole]), (array[:, :, whole] for array in (q, k, v))
    assert_exact(got, *clean, scale=1 / 8, lengths=lengths)
    assert not out[1].any()
    assert (lse[1] == -np.inf).all()
    assert_same_bits(comm, out, lse)


def test_nan_score_spoils_its_own_head_only(comm):
    q, k, v, run = made_up(comm, tokens=40, heads=4, kv_heads=4, seed=4)
    k[0, 17, 1, 0] = np.nan
    out, lse = treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme="recursive_doubling")
    assert np.isnan(out[:, :, 1]).all()
    assert np.isnan(lse[:, 1]).all()
    assert np.isfinite(out[:, :, [0, 2, 3]]).all()
    assert_same_bits(comm, out, lse)


def test_bfloat16_as_uint16_gives_the_same_bits(comm):
    q, k, v, run = made_up(comm, tokens=50, dtype=ml_dtypes.bfloat16)
    shards = q, np.ascontiguousarray(k[:, run]), np.ascontiguousarray(v[:, run])
    named = treeattn.decode(*shards, comm=comm)
    bits = [array.view(np.uint16) for array in shards]
    raw = treeattn.decode(bits[0], treeattn.Shard(*bits[1:], dtype="bfloat16"), comm=comm)
    for one, other in zip(named, raw, strict=True):
        np.testing.assert_array_equal(one, other)


def test_decoder_follows_a_growing_cache_without_copies(comm):
    """One preallocated array per rank, `lengths` grows; every step is exact and allocates nothing new."""
    q, k, v, _ = made_up(comm, tokens=8 * comm.size, batch=2, heads=4, kv_heads=2)
    mine = slice(comm.rank, None, comm.size)  # interleaved: token t lives on rank t mod p
    own_k, own_v = np.zeros_like(k[:, mine]), np.zeros_like(v[:, mine])
    layout = parse_layout("interleaved")
    with treeattn.Decoder(comm, heads=4, kv_heads=2, head_dim=64, batch=2, dtype="float32") as decoder:
        buffers = None
        for length in range(1, 8 * comm.size + 1, 3):
            lengths = np.array([length, max(length - 2, 0)])
            own = layout.shard_lengths(lengths, 8 * comm.size, comm.rank, comm.size)
            own_k[:, : own.max()] = k[:, mine][:, : own.max()]
            own_v[:, : own.max()] = v[:, mine][:, : own.max()]
            out, lse = decoder(q, own_k, own_v, lengths=own)
            assert_exact((out, lse), q, k, v, scale=1 / 8, lengths=lengths)
            assert buffers in (None, (out.ctypes.data, lse.ctypes.data))
            buffers = out.ctypes.data, lse.ctypes.data


def test_strided_views_need_no_copy(comm):
    """A cache stored [tokens, batch, kv_heads, head_dim] and a head-major query, as views."""
    q, k, v, run = made_up(comm, tokens=90, batch=2, queries=2)
    k_view = np.ascontiguousarray(k[:, run].transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3)
    v_view = np.ascontiguousarray(v[:, run].transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    q_view = np.ascontiguousarray(q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    out, lse = treeattn.decode(q_view, k_view, v_view, comm=comm)
    assert_exact((out, lse), q, k, v, scale=1 / 8)


def test_query_of_one_rank_counts(comm):
    root = comm.size - 1
    q, k, v, run = made_up(comm, tokens=70)
    wrong = q if comm.rank == root else None
    out, lse = treeattn.decode(wrong, k[:, run], v[:, run], comm=comm, q_root=root)
    assert_exact((out, lse), q, k, v, scale=1 / 8)


@pytest.mark.many_ranks
def test_sub_communicators_work_side_by_side(comm):
    half = comm.Split(comm.rank % 2)
    q, k, v, run = made_up(half, tokens=33, seed=comm.rank % 2)
    out, lse = treeattn.decode(q, k[:, run], v[:, run], comm=half, scheme="k_ary_tree:radix=3")
    assert_exact((out, lse), q, k, v, scale=1 / 8)
    half.Free()


@pytest.mark.many_ranks
def test_every_run_gives_the_same_bits(comm):
    q, k, v, run = made_up(comm, tokens=300, heads=8, kv_heads=2)
    results = {
        tuple(
            a.tobytes()
            for a in treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme="recursive_doubling")
        )
        for _ in range(20)
    }
    assert len(results) == 1


def different(comm, ordinary, odd):
    """`odd` on the last rank, `ordinary` on the others."""
    return odd if comm.rank == comm.size - 1 else ordinary


BAD = {
    "heads and kv_heads": lambda q, k, v, c: ((q[:, :, :3], k, v), {}),
    "head_dim": lambda q, k, v, c: ((q[..., :60], k[..., :60], v[..., :60]), {}),
    "integers": lambda q, k, v, c: ((q.astype(int), k.astype(int), v.astype(int)), {}),
    "k and v": lambda q, k, v, c: ((q, k, v[:, :-1]), {}),
    "three axes": lambda q, k, v, c: ((q[0], k, v), {}),
    "a list": lambda q, k, v, c: ((q.tolist(), k, v), {}),
    "last axis": lambda q, k, v, c: ((q, k[..., ::2], v[..., ::2]), {}),
    "lengths too long": lambda q, k, v, c: ((q, k, v), {"lengths": [10**6]}),
    "lengths negative": lambda q, k, v, c: ((q, k, v), {"lengths": [-1]}),
    "lengths of two": lambda q, k, v, c: ((q, k, v), {"lengths": [1, 1]}),
    "scale": lambda q, k, v, c: ((q, k, v), {"scale": float("nan")}),
    "scale is a flag": lambda q, k, v, c: ((q, k, v), {"scale": True}),
    "v twice": lambda q, k, v, c: ((q, treeattn.Shard(k, v), v), {}),
    "lengths twice": lambda q, k, v, c: ((q, treeattn.Shard(k, v, [1])), {"lengths": [1]}),
    "no v": lambda q, k, v, c: ((q, k), {}),
    "rules are no rules": lambda q, k, v, c: ((q, k, v), {"rules": {"causal": True}}),
    "scheme": lambda q, k, v, c: ((q, k, v), {"scheme": "binary_three"}),
    "radix": lambda q, k, v, c: ((q, k, v), {"scheme": "k_ary_tree:radix=0"}),
    "parameter": lambda q, k, v, c: ((q, k, v), {"scheme": "chain:radix=2"}),
    "nodes": lambda q, k, v, c: ((q, k, v), {"scheme": "hierarchical:nodes=100+1"}),
    "device": lambda q, k, v, c: ((q, k, v), {"device": "tpu"}),
    "q_root": lambda q, k, v, c: ((q, k, v), {"q_root": c.size}),
    "one rank: shape": lambda q, k, v, c: ((different(c, q, q[:, :, :2]), k, v), {}),
    "one rank: dtype": lambda q, k, v, c: (
        different(c, (q, k, v), tuple(a.astype("f2") for a in (q, k, v))),
        {},
    ),
    "one rank: broken": lambda q, k, v, c: ((q, k, different(c, v, v[:, :, :1])), {}),
    "one rank: scheme": lambda q, k, v, c: ((q, k, v), {"scheme": different(c, "chain", "binary_tree")}),
    "one rank: scale": lambda q, k, v, c: ((q, k, v), {"scale": different(c, 1.0, 2.0)}),
    "scheme is no text": lambda q, k, v, c: ((q, k, v), {"scheme": 5}),
    "one rank: ragged lengths": lambda q, k, v, c: ((q, k, v), {"lengths": different(c, [1], [[1], [2, 3]])}),
    "one rank: huge scale": lambda q, k, v, c: ((q, k, v), {"scale": different(c, 1.0, 10**400)}),
    "one rank: q_root is no number": lambda q, k, v, c: ((q, k, v), {"q_root": different(c, 0, print)}),
    "one rank: output": lambda q, k, v, c: (
        (q, k, v),
        {"scheme": treeattn.Reduction(output=different(c, "replicated", "heads"))},
    ),
    "one rank: q_root": lambda q, k, v, c: ((q, k, v), {"q_root": different(c, 0, None)}),
}


@pytest.mark.many_ranks
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_raise_alike_on_every_rank(comm, case):
    if case.startswith("one rank") and case != "one rank: broken" and comm.size == 1:
        pytest.skip("with one rank there is nobody to differ from: the call is right")
    q, k, v, _ = made_up(comm, tokens=9)
    arrays, options = BAD[case](q, k, v, comm)
    with pytest.raises(treeattn.TreeattnError) as caught:
        treeattn.decode(*arrays, comm=comm, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert comm.allgather(message) == [message] * comm.size


def test_a_remedy_is_named(comm):
    q, k, v, _ = made_up(comm, tokens=9)
    with pytest.raises(treeattn.ArgumentError, match="q_root must be the number of a rank, not 'first'"):
        treeattn.decode(q, k, v, comm=comm, q_root="first")
    with pytest.raises(treeattn.BackendError, match="take a scheme with a schedule"):
        treeattn.decode(*(a.astype("f8") for a in (q, k, v)), comm=comm, scheme="mpi_allreduce")


@pytest.mark.parametrize("scheme", ["recursive_doubling", "mpi_allreduce"])
def test_a_decoder_that_was_left_by_an_error_is_closed(comm, scheme):
    """Its next step must not return this rank's own part as if it were the whole."""
    q, k, v, run = made_up(comm, tokens=9)
    options = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float32", "scheme": scheme}
    with pytest.raises(KeyError), treeattn.Decoder(comm, **options) as decoder:
        raise KeyError
    with pytest.raises(treeattn.StateError, match="closed"):
        decoder(q, k[:, run], v[:, run])


def test_reducer_refuses_misuse(comm):
    from treeattn.backends.cpu import MergeOperator
    from treeattn.collectives.executors.interpreter import Reducer
    from treeattn.collectives.runtime.reducer import ReductionSpec

    buffer = np.zeros((2, 10), np.float32)
    operator = MergeOperator(8, np.dtype(np.float32))
    with pytest.raises(treeattn.ScheduleError, match="the communicator has"):
        Reducer(ReductionSpec(comm, operator, buffer), collectives.build("chain", comm.size + 1))
    strided = np.zeros((10, 4), np.float32).T
    with pytest.raises(treeattn.ScheduleError, match="C-contiguous"):
        Reducer(ReductionSpec(comm, operator, strided), collectives.build("chain", comm.size))
    with Reducer(ReductionSpec(comm, operator, buffer), collectives.build("chain", comm.size)) as reducer:
        with pytest.raises(treeattn.StateError, match="without start"):
            reducer.wait()
        reducer()
    with pytest.raises(treeattn.StateError, match="closed"):
        reducer.start()
    reducer.close()  # a second close is harmless


def test_private_communicator_keeps_user_messages_apart(comm):
    """A user's own pending messages on the same communicator, any tag, are not swallowed by a step."""
    q, k, v, run = made_up(comm, tokens=20)
    received = np.full(1, -1)
    pending = comm.Irecv(received, MPI.ANY_SOURCE, MPI.ANY_TAG)
    treeattn.decode(q, k[:, run], v[:, run], comm=comm)
    assert not pending.Test()
    comm.Barrier()  # nobody sends before everybody has looked
    comm.Send(np.array([comm.rank]), (comm.rank + 1) % comm.size, tag=0)
    pending.Wait()
    assert received[0] == (comm.rank - 1) % comm.size


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [1, 6, 16])
def test_scattered_output_is_this_ranks_slice_of_heads(comm, heads, batch):
    q, k, v, run = made_up(comm, tokens=40, batch=batch, queries=2, heads=heads, kv_heads=1)
    sliced = treeattn.Reduction("head_scatter", output="heads")
    out, lse = treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=sliced)
    own = slice(comm.rank * heads // comm.size, (comm.rank + 1) * heads // comm.size)
    assert out.shape == (batch, 2, own.stop - own.start, 64)
    if own.stop > own.start:
        assert_exact((out, lse), q[:, :, own], k, v, scale=1 / 8)
    with pytest.raises(treeattn.RestrictionError, match="output='heads'"):
        treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme="head_scatter")
    with pytest.raises(treeattn.RestrictionError, match="head_scatter"):
        treeattn.decode(
            q, k[:, run], v[:, run], comm=comm, scheme=treeattn.Reduction("chain", output="heads")
        )


@pytest.mark.parametrize("executor", ["mpi", "program", None])
def test_output_at_the_root_has_the_bits_that_all_would_have(comm, executor):
    """Of every schedule; steps follow one another, since ranks that are given nothing wait for nobody."""
    q, k, v, run = made_up(comm, tokens=40, batch=2, queries=2, heads=4, kv_heads=2)
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "batch": 2, "queries": 2, "dtype": "float32"}
    for name in REPLICATED if executor is None else ["binary_tree", "hierarchical", "ring"]:
        plans = (treeattn.Reduction(name, executor=executor, output=out) for out in ("replicated", "root"))
        everywhere, root = (treeattn.Decoder(comm, **shape, scheme=how) for how in plans)
        with everywhere, root:
            for step in range(6):
                given = q + np.float32(step), k[:, run], v[:, run]
                wanted, got = everywhere(*given), root(*given)
                if step == 4:
                    root.begin(*given)
                    got = root.finish()
                assert comm.rank == 0 or got == (None, None)
                for one, other in zip(wanted, got, strict=True):
                    assert comm.rank or one.tobytes() == other.tobytes()
            assert root.heads == (slice(0, 0) if comm.rank else slice(0, 4))
            assert (root.out is None) == (root.lse is None) == (comm.rank > 0)
            sent = [sum(map(len, comm.allgather(one.sent))) for one in (everywhere, root)]
            if everywhere.schedule.chunks == 1:
                assert sent[1] == comm.size - 1
            assert sent[1] <= sent[0]


def test_output_at_the_root_of_a_call(comm):
    q, k, v, run = made_up(comm, tokens=40)
    got = treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=treeattn.Reduction(output="root"))
    if comm.rank:
        assert got == (None, None)
    else:
        assert_exact(got, q, k, v, scale=1 / 8)
    mine = replace(collectives.build("chain", comm.size, result="root"), name="mine")
    with pytest.raises(treeattn.RestrictionError, match="mine leaves its result on rank 0: .* output='root'"):
        treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=mine)
    how = treeattn.Reduction(mine, output="root")
    assert (treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=how)[0] is None) == (comm.rank > 0)
    for scheme in ("head_scatter", "mpi_allreduce", "kv_ring", "head_all_to_all"):
        how = treeattn.Reduction(scheme, output="root")
        with pytest.raises(treeattn.RestrictionError, match=f"{scheme} (leaves each rank|is no schedule)"):
            treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=how)


def test_census_is_not_run_where_the_order_of_merges_decides_bits(comm):
    q, k, v, run = made_up(comm, tokens=40)
    assert "census" not in treeattn.schemes()
    assert "census" not in collectives.names()
    with pytest.raises(treeattn.RestrictionError, match="census is not run here: its ranks merge in unlike"):
        treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme="census")
    own = replace(collectives.build("census", comm.size), name="mine")
    if own.has_exclusive:  # from 3 ranks on
        with pytest.raises(
            treeattn.ScheduleError, match="mine sends what a rank has gathered without its own"
        ):
            treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=own)


def test_library_allreduce_with_the_compiled_operator(comm):
    """The library picks the order; the merge keeps bits equal where the library's order is one for all."""
    q, k, v, scale, out, lse = real_shard("contiguous", comm)
    got_out, got_lse = treeattn.decode(q, k, v, comm=comm, scheme="mpi_allreduce", scale=scale)
    np.testing.assert_allclose(got_out, out, rtol=0, atol=2e-5)
    np.testing.assert_allclose(got_lse, lse, rtol=0, atol=2e-5)
    with pytest.raises(treeattn.BackendError, match="float64"):
        treeattn.decode(
            *(a.astype(np.float64) for a in (q, k, v)), comm=comm, scheme="mpi_allreduce", scale=scale
        )


def test_library_allreduce_starts_and_waits(comm):
    from treeattn.backends.cpu import MergeOperator
    from treeattn.collectives.libraries.mpi_allreduce import MpiAllreduce
    from treeattn.collectives.runtime.reducer import ReductionSpec

    operator = MergeOperator(64)
    mine = np.full((3, 66), comm.rank, np.float32)
    once, twice = mine.copy(), mine.copy()
    with (
        MpiAllreduce(ReductionSpec(comm, operator, once)) as one,
        MpiAllreduce(ReductionSpec(comm, operator, twice)) as other,
    ):
        one()
        other.start()
        other.wait()
        with pytest.raises(treeattn.StateError, match="without start"):
            other.wait()
    np.testing.assert_allclose(once, twice, rtol=1e-6)


def test_the_command_counts_what_is_sent(comm):
    """Four heads with three queries on a ring: chunks are cut between heads, and empty ones are not sent."""
    from treeattn.cli.decode import _wire

    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "queries": 3, "dtype": "float32"}
    with treeattn.Decoder(comm, **shape, scheme="ring") as decoder:
        sent = [message for mine in comm.allgather(decoder.sent) for message in mine]
        told = _wire(comm, decoder)
    assert (told["messages"], told["bytes"]) == (len(sent), sum(size for _, size in sent))


def star(size, name="star"):
    """A schedule of one's own: everyone sends to rank 0, which sends back."""
    from treeattn.collectives import Schedule, Transfer, reversed_as_copies

    up = (tuple(Transfer(rank, 0) for rank in range(1, size)),) if size > 1 else ()
    return Schedule(name, size, 1, up + reversed_as_copies(up))


def test_a_schedule_of_ones_own_is_a_scheme(comm):
    q, k, v, run = made_up(comm, tokens=30)
    schedule = star(comm.size)
    out, lse = treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=schedule)
    assert_exact((out, lse), q, k, v, scale=1 / 8)
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float32"}
    with treeattn.Decoder(comm, **shape, scheme=schedule) as decoder:
        assert decoder.schedule is schedule
        assert decoder.scheme == "star"
        assert decoder.certificate == collectives.check(schedule)
        np.testing.assert_array_equal(decoder(q, k[:, run], v[:, run])[0], out)
    with pytest.raises(treeattn.ScheduleError, match="the communicator has"):
        treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=star(comm.size + 1))


@pytest.mark.many_ranks
def test_schedules_that_differ_between_ranks_are_refused_by_all(comm):
    """Of one name, but another order of messages on the last rank."""
    if comm.size < 3:
        pytest.skip("three ranks have the first order to differ in")
    q, k, v, run = made_up(comm, tokens=30)
    schedule = star(comm.size)
    if comm.rank == comm.size - 1:
        first, *rest = schedule.rounds
        schedule = collectives.Schedule("star", comm.size, 1, (first[::-1], *rest))
    with pytest.raises(treeattn.ArgumentError, match="the schedule star differs"):
        treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=schedule)
    mine = "chain" if comm.rank == comm.size - 1 else star(comm.size)
    with pytest.raises(treeattn.ArgumentError, match="scheme differs .* 'star' on rank 0, 'chain'"):
        treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=mine)


def wrong_schedules(size):
    """What is made wrong, and what the error says."""
    rounds = star(size).rounds
    yield collectives.Schedule("counts twice", size, 1, (rounds[0],) * 2), "twice"
    yield collectives.Schedule("a list", size, 1, list(rounds)), "a tuple of rounds"
    yield collectives.Schedule("lists", size, 1, tuple(map(list, rounds))), "a round is a tuple of Transfer"
    yield collectives.Schedule(None, size, 1, rounds), "has a name"
    yield collectives.Schedule("halves", size, 1.5, rounds), "whole numbers"


@pytest.mark.parametrize("case", range(5))
def test_wrong_schedules_are_refused_by_all(comm, case):
    if comm.size == 1:
        pytest.skip("a rank alone has no rounds to get wrong")
    q, k, v, run = made_up(comm, tokens=30)
    wrong, message = list(wrong_schedules(comm.size))[case]
    with pytest.raises(treeattn.ScheduleError, match=message):
        treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=wrong)
    last = wrong if comm.rank == comm.size - 1 else star(comm.size, str(wrong.name))
    with pytest.raises(treeattn.TreeattnError):
        treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=last)


@pytest.mark.parametrize("exporter", [Dlpack, Interface])
@pytest.mark.parametrize("scheme", ["hierarchical", "kv_ring", "query_ring"])
def test_arrays_of_any_library(comm, exporter, scheme):
    """Read-only views go through attention and through the baselines that send them."""
    q, k, v, run = made_up(comm, tokens=37)
    wanted = treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=scheme)
    got = treeattn.decode(exporter(q), exporter(k[:, run]), exporter(v[:, run]), comm=comm, scheme=scheme)
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1], wanted[1])


def test_steps_over_bfloat16_of_another_library(comm):
    bits, k, v = (bfloat16_bits(array) for array in made_up(comm, tokens=9)[:3])
    wanted = treeattn.decode(bits, treeattn.Shard(k, v, dtype="bfloat16"), comm=comm)
    with treeattn.Decoder(comm, heads=4, kv_heads=2, head_dim=64, dtype="bfloat16") as decoder:
        given = [Dlpack(array, code=4) for array in (bits, k, v)]
        for _ in range(2):
            out, lse = decoder(*given)
            np.testing.assert_array_equal(out, wanted[0])
            np.testing.assert_array_equal(lse, wanted[1])
        bits[...] = bfloat16_bits(np.zeros(bits.shape))  # the same memory, other values
        assert (decoder(*given)[0] != wanted[0]).any()


def test_an_array_that_cannot_be_taken_stops_every_rank(comm):
    q, k, v, run = made_up(comm, tokens=37)
    q = Dlpack(q, kind=2) if comm.rank == comm.size - 1 else q
    with pytest.raises(treeattn.ArgumentError, match="device='cpu' was asked for: move the array"):
        treeattn.decode(q, k[:, run], v[:, run], comm=comm, device="cpu")


def test_results_are_of_the_kind_of_the_query(comm):
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `oracle`)")
    q, k, v, run = made_up(comm, tokens=37)
    wanted = treeattn.decode(q, k[:, run], v[:, run], comm=comm)
    tensors = [torch.from_numpy(array) for array in (q, k[:, run], v[:, run])]
    for root in (None, 0):
        got = treeattn.decode(*tensors, comm=comm, q_root=root)
        assert all(isinstance(tensor, torch.Tensor) for tensor in got)
        np.testing.assert_array_equal(got[0].numpy(), wanted[0])
    with treeattn.Decoder(comm, heads=4, kv_heads=2, head_dim=64, dtype="float32") as decoder:
        out, _ = decoder(*tensors)
        assert out.data_ptr() == decoder.out.ctypes.data
        np.testing.assert_array_equal(out.numpy(), wanted[0])
