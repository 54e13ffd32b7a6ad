"""Saved caches: what another number of ranks reads in another layout, and what damage, full disks and jobs
that are killed leave behind."""

import errno
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator.runtime import StrictRuntime
from tests.support.caches import LAYOUTS, Plain, caches, layout_of
from tests.support.drawn import examples
from treeattn.backends.cuda import cupy_runtime
from treeattn.cache import ShardedCache, saved, sharded
from treeattn.cache.saved import read_index
from treeattn.errors import ArgumentError, BackendError


@pytest.fixture(autouse=True)
def ranks_are_threads(monkeypatch):
    monkeypatch.setattr(sharded.communicators, "intracomm", lambda comm: comm)


def on_all_ranks(size, call):
    """What ``call(comm)`` returns or raises on each rank of a job of so many threads, in order."""
    said, meeting = [b""] * size, threading.Barrier(size, timeout=60)

    def allgather(rank, mine):
        said[rank] = pickle.dumps(mine)
        meeting.wait()
        everyone = [pickle.loads(one) for one in said]
        meeting.wait()
        return everyone

    def run(rank):
        comm = SimpleNamespace(rank=rank, size=size, allgather=lambda mine: allgather(rank, mine))
        comm.bcast, comm.barrier = lambda mine, root=0: comm.allgather(mine)[root], lambda: comm.allgather(0)
        try:
            return call(comm)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def save(ranks, directory, about=None):
    """What it raised on each rank, None where it did not."""

    def on(comm):
        ranks[comm.rank]._comm = comm
        ranks[comm.rank].save(directory, about)

    return on_all_ranks(len(ranks), on)


def load(directory, size, **options):
    return on_all_ranks(size, lambda comm: ShardedCache.load(directory, comm, **options))


@examples(20)
@given(LAYOUTS, LAYOUTS, st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_any_number_of_ranks_reads_what_another_wrote(tmp_path_factory, before, after, size, other, seed):
    """In any layout, and goes on; with latent keys, values of another width, and 8 bits."""
    directory = tmp_path_factory.mktemp("saved") / "cache"
    plain = Plain(before, size, 1 + seed % 3, seed)
    for act in (plain.append, plain.select, plain.append_own, plain.rollback):
        act()
    assert save(plain.ranks, directory, {"of": seed}) == [None] * size
    capacity = plain.ranks[0].capacity
    where = layout_of(after, other, capacity, plain.draw)
    plain.ranks, plain.grows = load(directory, other, layout=where, drafts=9), after == "interleaved"
    plain.capacity = capacity
    plain.check()
    for act in (plain.append, plain.commit):
        act()
        plain.check()
    assert read_index(directory).about == {"of": seed}


def filled(size=3, tokens=7, **options):
    ranks = caches(size, batch=2, capacity=9, layers=2, **options)
    new = np.random.default_rng(tokens).standard_normal((2, 2, 2, tokens, 2, 8)).astype(np.float32)
    for cache in ranks:
        for layer, (k, v) in zip(cache.layers, new, strict=True):
            layer.append(k, v, [tokens, tokens - 2])
    return ranks


def test_a_gpu_is_told_where_tokens_go_by_itself(tmp_path, monkeypatch):
    """Those of one file, dealt out anyhow, among those of another: no slice, and nothing of the host."""
    monkeypatch.setattr(cupy_runtime, "current", StrictRuntime)
    save(filled(2, layout=[0, 1, 1, 0, 1, 0, 0, 1, 1]), tmp_path)
    (there,), (here,) = load(tmp_path, 1, device="cuda"), load(tmp_path, 1)
    for row, length in enumerate(here.lengths):
        for found, wanted in zip(there.arrays, here.arrays, strict=True):
            np.testing.assert_array_equal(found[row, :length].get(), wanted[row, :length])


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_rank_reads_its_own_tokens_alone(tmp_path):
    """Damage where only others look is not seen, where it looks it is named by file, layer and position."""
    save(filled(3), tmp_path)
    index = read_index(tmp_path)
    damaged = tmp_path / index.parts[1].file  # positions 1 and 4 of 0 to 6
    start = damaged.read_bytes().index(saved.files.open_cache(damaged)["layers.1.v"].tobytes())
    row = 2 * 8 * 4
    flip(damaged, start + row + 5)  # of position 4
    told = load(tmp_path, 4)
    wanted = f"rank 0: {damaged}: damaged: v of layer 1 at position 4; save the cache again"
    assert [str(error) for error in told] == [wanted] * 4
    plan = caches(4, batch=2, capacity=9, layers=2)
    for cache in plan[1:]:
        saved.read_layers(cache.layers, tmp_path, index)  # position 4 is rank 0's
    (tmp_path / index.parts[2].file).unlink()  # 2 and 5
    saved.read_layers(plan[3].layers, tmp_path, index)  # 3, of the first file
    with pytest.raises(ArgumentError, match="no such file"):
        saved.read_layers(plan[2].layers, tmp_path, index)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: os.truncate(path, path.stat().st_size - 3), "not a readable safetensors file"),
        (lambda path: os.truncate(path, 0), "not a readable safetensors file"),
        (lambda path: flip(path, path.stat().st_size - 1), "damaged: v of layer 1 at position 5"),
        (lambda path: flip(path, 3), "not a readable safetensors file"),
        (lambda path: flip(path.with_name("index.json"), 300), "index.json: damaged"),
        (lambda path: path.with_name("index.json").unlink(), "no saved cache: there is no index.json"),
        (lambda path: path.with_name("index.json").write_text("{}"), "damaged, or of another version"),
    ],
)
def test_what_is_damaged_is_named(tmp_path, harm, words):
    save(filled(2), tmp_path)
    path = tmp_path / read_index(tmp_path).parts[1].file
    harm(path)
    told = load(tmp_path, 3)
    assert {type(error) for error in told} == {ArgumentError}
    assert len({str(error) for error in told}) == 1
    assert words in str(told[0])
    assert path.name in str(told[0]) or "index.json" in str(told[0])
    assert "\n" not in str(told[0])


@pytest.mark.parametrize(
    "change",
    [
        *({"file": name} for name in ("../cache/{}", "/dev/null", "inner/{}", "{}\n", ".")),
        *({"totals": (9, 5)}, {"parts": ()}, {"totals": (-1, 5)}, {"layers": 10**9}),
    ],
    ids=str,
)
def test_an_index_promises_no_more_than_there_is(tmp_path, change):
    """Whoever made it may have signed it, too: no file elsewhere is read, nor memory that nobody wrote."""
    save(filled(2), tmp_path)
    index = read_index(tmp_path)
    if "file" in change:
        first, *others = index.parts
        first = msgspec.structs.replace(first, file=change["file"].format(first.file))
        change = {"parts": (first, *others)}
    signed = msgspec.structs.replace(index, **change)
    (tmp_path / "index.json").write_bytes(signed.encode())
    with pytest.raises(ArgumentError, match="index.json: damaged"):
        read_index(tmp_path)


def test_a_saved_cache_has_the_modes_of_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        save(filled(2), tmp_path / "cache")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "cache").iterdir()] == [0o600] * 3


def held(directory):
    (cache,) = load(directory, 1)
    assert isinstance(cache, ShardedCache), cache
    return cache.totals.tolist()


def test_a_full_disk_of_one_rank_is_told_by_all(tmp_path):
    """What was saved is as it was, and nothing of the new one stays."""
    save(filled(3), tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    ranks, full = filled(3, tokens=9), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(saved.os, "fsync", side_effect=[None, full, *[None] * 9]):
        told = save(ranks, tmp_path)
    assert {type(error) for error in told} == {BackendError}
    assert len({str(error) for error in told}) == 1
    assert "No space left on device" in str(told[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert held(tmp_path) == [7, 5]


def test_whenever_a_job_is_killed_there_is_the_old_cache_or_the_new_one(tmp_path):
    """It ends before each of the calls that change the disk, without another word."""
    names = ("replace", "fsync", "unlink", "chmod")
    found = set()
    for last in range(40):
        directory = tmp_path / str(last)
        save(filled(1), directory)
        child = os.fork()
        if child == 0:
            left = [last]

            def counted(call, left=left):
                def run(*arguments, **options):
                    if not left[0]:
                        os._exit(9)
                    left[0] -= 1
                    return call(*arguments, **options)

                return run

            for name in names:
                setattr(os, name, counted(getattr(os, name)))
            failed = save(filled(1, tokens=9), directory)
            os._exit(0 if failed == [None] else 1)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, 9)
        found.add((code, *held(directory)))
        if code == 0:
            break
        assert save(filled(1, tokens=8), directory) == [None]  # what was left behind is no obstacle
        assert held(directory) == [8, 6]
        assert len(list(directory.iterdir())) == 2
    assert found == {(9, 7, 5), (9, 9, 7), (0, 9, 7)}


def test_two_jobs_do_not_save_in_one_place_at_once(tmp_path):
    """The one that ends first would remove what the other one wrote. What others write there it leaves."""
    (tmp_path / ".result.json.x1.part").write_text("of another command")
    assert save(filled(2), tmp_path) == [None] * 2
    before = sorted(path.name for path in tmp_path.iterdir())
    with saved._claimed(tmp_path):
        told = save(filled(2, tokens=9), tmp_path)
        (words,) = {str(error) for error in told}
        assert f"{tmp_path}: another job is saving a cache there" in words
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert save(filled(2, tokens=9), tmp_path) == [None] * 2
    assert (tmp_path / ".result.json.x1.part").exists()


def test_what_cannot_be_saved_or_loaded(tmp_path):
    ranks = filled(2)
    assert "cannot be written as JSON" in str(save(ranks, tmp_path / "new", {"it": object()})[1])
    (tmp_path / "file").write_text("")
    assert "cannot be made" in str(save(ranks, tmp_path / "file")[0])
    save(ranks, tmp_path / "cache")
    assert "exceeds the capacity of 5" in str(load(tmp_path / "cache", 2, capacity=5, layout="zigzag")[1])
    for cache in ranks:
        cache.layers[1].rollback([3, 3])
    told = save(ranks, tmp_path / "new")
    assert "layer 1 holds [3, 3] tokens, the first one [7, 5]" in str(told[0])
    assert list((tmp_path / "new").iterdir()) == []
