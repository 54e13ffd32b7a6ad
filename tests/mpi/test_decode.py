"""The main job on real and made-up caches, at whatever size the job has."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import treeattn
from tests.support.exporters import Dlpack, Interface
from tests.support.frames import frames
from tests.support.problems import assert_exact, random_qkv
from tests.support.ranks import own_run
from tests.support.schedules import star
from tests.support.schemes import REPLICATED
from treeattn import collectives


def made_up(comm, **shape):
    """(q, whole k, whole v, this rank's run): the same arrays on every rank."""
    return *random_qkv(**shape), own_run(comm, shape["tokens"])


def test_query_of_one_rank_counts(comm):
    root = comm.size - 1
    q, k, v, run = made_up(comm, tokens=70)
    wrong = q if comm.rank == root else None
    out, lse = treeattn.decode(wrong, k[:, run], v[:, run], comm=comm, q_root=root)
    assert_exact((out, lse), q, k, v, scale=1 / 8)


@pytest.mark.parametrize(("heads", "batch"), [(1, 1), (6, 3), (16, 1)])
def test_scattered_output_is_this_ranks_slice_of_heads(comm, heads, batch):
    q, k, v, run = made_up(comm, tokens=40, batch=batch, queries=2, heads=heads, kv_heads=1)
    sliced = treeattn.Reduction("head_scatter", output="heads")
    out, lse = treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=sliced)
    own = slice(comm.rank * heads // comm.size, (comm.rank + 1) * heads // comm.size)
    assert out.shape == (batch, 2, own.stop - own.start, 64)
    if own.stop > own.start:
        assert_exact((out, lse), q[:, :, own], k, v, scale=1 / 8)


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


@pytest.mark.parametrize("exporter", [Dlpack, Interface])
@pytest.mark.parametrize("scheme", ["hierarchical", "kv_ring", "query_ring"])
def test_arrays_of_any_library(comm, exporter, scheme):
    """Read-only views go through attention and through the baselines that send them."""
    q, k, v, run = made_up(comm, tokens=37)
    wanted = treeattn.decode(q, k[:, run], v[:, run], comm=comm, scheme=scheme)
    got = treeattn.decode(exporter(q), exporter(k[:, run]), exporter(v[:, run]), comm=comm, scheme=scheme)
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1], wanted[1])


ROOT = Path(treeattn.__file__).resolve().parents[1]
MOST = 20
PAGE = (ROOT / "docs/architecture.md").read_text()


def ours(path):
    """The file below the top folder, as a reader opens it: a link leads from treeattn/ to collectives/."""
    return str(Path(path).resolve()).removeprefix(f"{ROOT}/")


def test_a_decode_runs_few_files(comm):
    q, k, v = (np.ones((1, n, heads, 64), np.float32) for n, heads in ((1, 8), (100, 2), (100, 2)))
    treeattn.decode(q, k, v, comm=comm)

    def files_of_one():
        return sorted(set(map(ours, frames(lambda: treeattn.decode(q, k, v, comm=comm)))))

    # On a busy machine a rank may wait so long for another that it looks whether that still runs.
    files = min((files_of_one() for _ in range(10)), key=len)
    assert [name for name in files if name.removeprefix("treeattn/") not in PAGE] == []
    assert 10 < len(files) <= MOST, " ".join(files)


SHAPE = {"heads": 6, "kv_heads": 6, "head_dim": 16, "dtype": "float32"}


def sections(decoder):
    """Title -> {name: what is said of it}."""
    found, rows = {}, {}
    for line in str(decoder.plan).splitlines()[1:]:
        if line.startswith("  "):
            name, _, text = line.strip().partition("  ")
            rows[name] = text.strip()
        else:
            rows = found[line] = {}
    return found


def test_a_plan_says_what_a_step_does(comm):
    with treeattn.Decoder(comm, **SHAPE, scheme="recursive_doubling") as decoder:
        said = sections(decoder)
        assert list(said["stages"]) == ["attend", "reduce", "finish"]
        assert f"run by {decoder.executor} over mpi" in said["stages"]["reduce"]
        assert said["buffers"]["records"] == "[1, 6, 1, 18] float32, 432 bytes"
        sent = said["messages that this rank sends in a step"]
        assert set(sent) == ({f"{size:,} bytes" for _, size in decoder.sent} or {"none"})
        assert set(said["why"]) == {"scheme", "transport", "executor", "calls"}
        with pytest.raises(dataclasses.FrozenInstanceError):
            decoder.plan.transport = "nccl"
    assert str(decoder.plan) == "recursive_doubling: closed"
