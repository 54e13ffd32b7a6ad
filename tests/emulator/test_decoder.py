"""`treeattn.decode` and `Decoder` with device="cuda", one rank, on the emulator: the same table of cases."""

import functools
import gc
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treeattn
from tests.support import token_trees
from tests.support.exporters import Dlpack, OnGpu
from tests.support.pages import in_pages
from treeattn import ShardedCache
from treeattn.backends.cuda import cupy_runtime
from treeattn.errors import ArgumentError, RestrictionError, StateError
from treeattn.token_tree import TokenTree, Verifier, verify

from .cases import Case
from .runtime import EmulatorRuntime, LazyRuntime


def test_tensor_cores_can_be_switched_off(runtime: EmulatorRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("bfloat16", 64, group=8, kv_heads=1)
    q, k, v, _, _ = case.inputs()
    rounded, _ = treeattn.decode(q, k, v, scale=case.scale, device="cuda")
    monkeypatch.setenv("TREEATTN_TENSOR_CORES", "0")
    out, lse = treeattn.decode(q, k, v, scale=case.scale, device="cuda")
    case.check(out, lse, tensor_cores=False)
    assert (out != rounded).any()
    assert runtime.launches == 4  # attention and finish: one rank has nothing to merge
    monkeypatch.setenv("TREEATTN_TENSOR_CORES", "off")
    with pytest.raises(treeattn.ArgumentError, match="TREEATTN_TENSOR_CORES=off: use 0 or 1"):
        treeattn.decode(q, k, v, device="cuda")


@pytest.mark.parametrize(("where", "scheme"), [("host", "binary_tree"), ("device", "ring")])
def test_a_decoder_follows_a_growing_cache(runtime: EmulatorRuntime, where: str, scheme: str) -> None:
    case = Case("bfloat16", 64, group=4, batch=2)
    q, k, v, _, _ = case.inputs()
    lengths = np.zeros(2, np.int64)
    with treeattn.Decoder(**case.plan, scheme=scheme) as decoder:
        decoder(q, k, v, lengths=lengths if where == "device" else [0, 0])
        allocations = runtime.allocations
        for length in (3, 150, 64):
            lengths[:] = length, length - 1
            out, lse = decoder(q, k, v, lengths=lengths if where == "device" else lengths.tolist())
            grown = Case("bfloat16", 64, group=4, batch=2, lengths=(length, length - 1))
            grown.check(out, lse, tensor_cores=True)
        assert runtime.allocations == allocations
        assert runtime.launches == 4  # one a step: on one rank attention finishes, too
        wanted, out[...] = out.copy(), 0
        decoder.local(q, k, v, lengths=lengths)
        decoder.reduce()
        assert not out.any()  # as long as finish() is to come
        np.testing.assert_array_equal(decoder.finish()[0], wanted)
        assert decoder.certificate is not None
        assert decoder.certificate.determinism == "A"


def test_a_decoder_follows_its_block_table_of_the_host(runtime: EmulatorRuntime) -> None:
    """Longer by a page now and then, in room that is there; a table on the GPU says the same. Pages are not
    captured yet."""
    case, size = Case("float16", 64, group=2, batch=2, queries=2, tokens=90), 16
    (q, *row, _, _), whole = case.inputs(), np.array([90, 37])
    (k, table), (v, _) = (in_pages(one, size, whole) for one in row)
    with (
        treeattn.Decoder(**case.plan, cache=treeattn.CacheFormat(page_size=size)) as paged,
        treeattn.Decoder(**case.plan) as plain,
    ):
        for step, length in enumerate((64, 65, 70, 80, 90)):
            lengths = np.minimum(whole, length)
            given = table[:, : -(-length // size)].tolist()
            before = runtime.allocations
            found = [[*paged(q, treeattn.Shard(k, v, lengths, block_table=given))]]
            assert step < 1 or runtime.allocations == before
            there = treeattn.Shard(k, v, lengths, block_table=OnGpu(np.array(given, np.int32)))
            found.append([*treeattn.decode(q, there, device="cuda")])
            wanted = [one.tobytes() for one in plain(q, *row, lengths)]
            assert [[one.tobytes() for one in results] for results in found] == [wanted] * 2
        with pytest.raises(RestrictionError, match="a captured step takes no block table"):
            paged.capture(q, k, v, whole)


def test_bfloat16_comes_as_bits_or_as_a_type_of_its_own(runtime: EmulatorRuntime) -> None:
    case = Case("bfloat16", 64)
    q, k, v, _, _ = case.inputs()
    bits = [x.view(np.uint16) for x in (q, k, v)]
    named = treeattn.decode(q, k, v, device="cuda")
    given = bits[0], treeattn.Shard(*bits[1:], dtype="bfloat16")
    raw = treeattn.decode(*given, device="cuda")
    rooted = treeattn.decode(*given, device="cuda", q_root=0)
    for results in (raw, rooted):
        for one, other in zip(named, results, strict=True):
            np.testing.assert_array_equal(one, other)
    with treeattn.Decoder(**case.plan) as decoder:
        np.testing.assert_array_equal(decoder(*bits)[0], named[0])


def test_a_query_of_any_strides_comes_by_way_of_the_host(
    runtime: EmulatorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies between host and device are of contiguous memory: the query is packed on the device first."""
    case = Case("float32", 64, queries=3)
    q, k, v, _, _ = case.inputs()
    spread = np.repeat(q, 2, axis=1)[:, ::2]
    copies: list[tuple[bool, bool]] = []

    def copy(into: Any, source: Any) -> None:
        copies.append((into.flags.c_contiguous, source.flags.c_contiguous))
        EmulatorRuntime.copy(runtime, into, source)

    monkeypatch.setattr(runtime, "copy", copy)
    case.check(*treeattn.decode(spread, k, v, device="cuda", q_root=0), tensor_cores=False)
    assert copies == [(True, False), (True, True), (True, True)]  # on the device, down, up


@pytest.mark.parametrize("batch", [1, 2])
def test_output_by_heads(runtime: EmulatorRuntime, batch: int) -> None:
    case = Case("float32", 64, batch=batch)
    q, k, v, _, _ = case.inputs()
    how = treeattn.Reduction("head_scatter", output="heads")
    case.check(*treeattn.decode(q, k, v, device="cuda", scheme=how), False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q.tolist(), k, v), "q is a list"),
        (lambda q, k, v: (q, k.astype(np.float16), v), "k and v are of one type"),
        (lambda q, k, v: (q, k.astype(np.uint16), v.astype(np.uint16)), "dtype='bfloat16'"),
        (lambda q, k, v: (q, treeattn.Shard(k, v, [151])), "between 0 and the shard's 150"),
    ],
)
def test_bad_input_has_one_clear_message(runtime: EmulatorRuntime, change: Any, message: str) -> None:
    """Of what the processor refuses in other words, or somewhere else."""
    with pytest.raises(ArgumentError, match=message):
        treeattn.decode(*change(*Case("float32", 64).inputs()[:3]), device="cuda")


def test_a_step_is_checked_against_the_plan(runtime: EmulatorRuntime) -> None:
    case = Case("float16", 64)
    q, k, v, _, _ = case.inputs()
    with treeattn.Decoder(**case.plan) as decoder:
        decoder(q, k, v)
        with pytest.raises(ArgumentError, match="q is bfloat16, expected float16"):
            decoder(*(x.astype(ml_dtypes.bfloat16) for x in (q, k, v)))
        with pytest.raises(ArgumentError, match="q has shape"):
            decoder(q[:, :, :1], k, v)
        with pytest.raises(ArgumentError, match="k is a list"):
            decoder(q, [k], v)
        case.check(*decoder(q, k, v), False)


def test_a_captured_step_of_one_rank_follows_growing_lengths(runtime: EmulatorRuntime) -> None:
    case = Case("bfloat16", 64, group=4, batch=2)
    q, k, v, _, _ = case.inputs()
    lengths = np.zeros(2, np.int64)
    with treeattn.Decoder(**case.plan) as decoder:
        with pytest.raises(ArgumentError, match="int64 device array"):
            decoder.capture(q, k, v, [0, 0])
        step = decoder.capture(q, k, v, lengths)
        launches, allocations = runtime.launches, runtime.allocations
        for length in (150, 0, 17):
            lengths[:] = length
            Case("bfloat16", 64, group=4, batch=2, lengths=(length, length)).check(*step(), tensor_cores=True)
        assert (runtime.graph_launches, runtime.launches, runtime.allocations) == (3, launches, allocations)
        decoder(q, k, v, [3, 3])
        with pytest.raises(ArgumentError, match="pass them as an int64 device array"):
            runtime.capture(lambda: decoder(q, k, v, [4, 4]))
    with pytest.raises(StateError, match="closed"):
        step()


def test_staging_waits_before_it_folds_and_before_it_ends(
    runtime: EmulatorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(runtime, "copy", lambda into, source: log.append("copy"))
    monkeypatch.setattr(runtime, "synchronize", lambda: log.append("wait"))
    with treeattn.Decoder(**Case("float32", 64).plan, scheme=treeattn.Reduction(transport="host")) as decoder:
        fold: Any = functools.partial(log.append, "fold")
        fold.close = functools.partial(log.append, "end")
        monkeypatch.setattr(decoder._reducer, "_reducer", fold)
        decoder.fold()
        assert log == ["copy", "wait", "fold", "copy"]
    assert log[4:] == ["wait", "end"]


def test_a_captured_step_keeps_what_it_works_on(runtime: EmulatorRuntime) -> None:
    """A graph holds addresses: neither its inputs nor its decoder may go before it."""
    case = Case("float32", 64)
    arrays = [array.copy() for array in case.inputs()[:3]]
    kept = [weakref.ref(array) for array in arrays]
    decoder = treeattn.Decoder(**case.plan)
    step = decoder.capture(*arrays)
    decoder(*case.inputs()[:3])  # it holds the arrays of its last step only
    arrays.clear()
    kept.append(weakref.ref(decoder))
    del decoder
    gc.collect()
    assert [thing for thing in kept if thing() is None] == []
    case.check(*step(), tensor_cores=False)


@pytest.mark.parametrize("exporter", [lambda array: Dlpack(array, kind=2), OnGpu])
def test_arrays_of_any_library_that_lie_on_the_gpu(runtime: EmulatorRuntime, exporter: Any) -> None:
    runtime.holds = lambda array: type(array) is np.ndarray  # type: ignore[method-assign]
    case = Case("float32", 64)
    q, k, v, _, _ = case.inputs()
    lengths = np.full(case.batch, k.shape[1], np.int64)
    given = [exporter(array) for array in (q, k, v)]
    # device=None: where q lies
    out, lse = treeattn.decode(*given, lengths=exporter(lengths), scale=case.scale)
    case.check(out, lse, tensor_cores=False)
    if isinstance(given[0], Dlpack):
        assert [array.asked for array in given] == [[1]] * 3  # the default stream, as DLPack counts
    with pytest.raises(
        treeattn.ArgumentError, match="q lies in the memory of the host, but .* device='cuda'"
    ):
        treeattn.decode(Dlpack(q), *given[1:], device="cuda")


def test_a_captured_step_over_arrays_of_another_library(runtime: EmulatorRuntime) -> None:
    case = Case("float32", 64)
    q, k, v, _, _ = case.inputs()
    with treeattn.Decoder(**case.plan, scale=case.scale) as decoder:
        given = [Dlpack(array, kind=2) for array in (q, k, v)]
        step = decoder.capture(*given)
        q += 1
        got = [array.copy() for array in step()]
        wanted = decoder(q, k, v)
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_array_equal(got[1], wanted[1])


@pytest.mark.parametrize("way", ["whole", "in parts", "captured", "capture", "merge", "prefill"])
def test_a_step_on_another_stream_follows_the_last_one(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """They use the same buffers. Without `follow` the first step comes last."""
    np.testing.assert_array_equal(two_steps(monkeypatch, LazyRuntime(), way), 2)
    runtime = LazyRuntime()
    monkeypatch.setattr(runtime, "follow", lambda last: last)
    assert (two_steps(monkeypatch, runtime, way) != 2).all()


def two_steps(monkeypatch: pytest.MonkeyPatch, runtime: LazyRuntime, way: str) -> Any:
    """out, after a step whose result is 0 and one on another stream whose result is 2."""
    monkeypatch.setattr(cupy_runtime, "current", lambda: runtime)
    q = np.zeros((1, 1, 1, 64), np.float32)
    k, values = q, (q, q + 2)
    decoder = treeattn.Decoder(heads=1, kv_heads=1, head_dim=64, dtype="float32", device="cuda")
    merger = treeattn.Merger(lse_shape=(1, 1), head_dim=64, dtype="float32", device="cuda")
    out = None
    captured = decoder.capture(q, k, values[1]) if way == "captured" else tuple
    prefill = treeattn.Prefill(tokens=1, heads=1, kv_heads=1, head_dim=64, dtype="float32", device="cuda")
    runtime.synchronize_all()
    for step, v in enumerate(values):
        runtime.stream = 5 + step
        if way == "merge":
            merger(v[0], np.zeros((1, 1), np.float32))
        elif way == "prefill":
            out, _ = prefill(q, k, v)
        elif way == "capture" and step:
            decoder.capture(q, k, v)
        elif way == "captured" and step:
            captured()
        elif way == "in parts":
            decoder.local(q, k, v)
            runtime.stream = 5
            decoder.reduce()
            decoder.finish()
        else:
            decoder(q, k, v)
    runtime.stream = 7
    decoder.synchronize() if way == "whole" else runtime.synchronize_all()
    return {"merge": merger.out, "prefill": out}.get(way, decoder.out)


def test_packed_is_each_beam_alone(runtime: EmulatorRuntime) -> None:
    for seed in range(6):
        case = token_trees.Case.draw(seed, 1, ("float32",), (64,))
        k, v, lengths = case.shard(0)
        drafts = case.draft_k, case.draft_v, case.tree
        case.check(*verify(case.q, k, v, *drafts, lengths=lengths.tolist(), device="cuda"))


def test_nothing_is_allocated_from_step_to_step(runtime: EmulatorRuntime) -> None:
    """With another tree and other lengths every time, over a cache that lies on the device."""
    draw, nodes = np.random.default_rng(0), 7
    plan = {"batch": 2, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "device": "cuda"}
    cache = ShardedCache(capacity=60, drafts=nodes, **plan)

    def rows(count: int, heads: int) -> Any:
        wide = draw.standard_normal((2, count, heads, 64)).astype(np.float32)
        return (wide.view(np.uint32) >> 16).astype(np.uint16)  # the bits of bfloat16

    with Verifier(heads=4, nodes=nodes, **plan) as verifier:
        for step in range(4):
            parents = [[int(draw.integers(-1, node)) for node in range(nodes)] for _ in range(2)]
            tree = TokenTree.from_parents([list(range(nodes))] * 2, parents, [nodes, 3])
            q, draft_k, draft_v = rows(nodes, 4), rows(nodes, 2), rows(nodes, 2)
            allocated = runtime.allocations
            out, _ = verifier(
                *(q, cache.k, cache.v, draft_k, draft_v, tree, cache.lengths),
                shard_lengths=cache.shard_lengths,
            )  # fmt: skip
            assert step < 2 or runtime.allocations == allocated
            assert np.isfinite(out).all()
            cache.propose(draft_k, draft_v, tree)
            paths = [tree.path(row, int(tree.depths[row].argmax())) for row in range(2)]
            longest = max(map(len, paths))
            cache.commit([[*path, *[-1] * (longest - len(path))] for path in paths])
    assert (cache.totals > 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_what_was_put_in_comes_out(runtime: EmulatorRuntime, tmp_path: Path, dtype: str) -> None:
    """Bits of two types, with values of another width; the array grows in between."""
    draw, bits = np.random.default_rng(1), np.uint16 if dtype == "bfloat16" else np.uint8
    scales = {} if dtype == "bfloat16" else {"k_scale": 0.5, "v_scale": 2.0}
    cache = ShardedCache(
        batch=2, capacity=3, kv_heads=2, head_dim=64, v_dim=128, dtype=dtype, device="cuda", **scales
    )
    k, v = (draw.integers(0, 100, (2, 4, 2, width)).astype(bits) for width in (64, 128))
    on_device = [cache._plan.device.memory.empty(array.shape, array.dtype) for array in (k, v)]
    for target, source in zip(on_device, (k, v), strict=True):
        runtime.copy(target, source)
    cache.append(*on_device, counts=[4, 3])
    cache.append(*on_device)
    cache.select([1, 0])
    cache.rollback([6, 8])
    cache.save(tmp_path)
    read = ShardedCache.load(tmp_path, device="cuda", layout="contiguous")
    for held in (cache, read):
        assert held.totals.tolist() == [6, 8]
        for whole, array in ((k, held.k), (v, held.v)):
            there = cache._plan.device.to_host(array)
            np.testing.assert_array_equal(there[0, :6], np.concatenate([whole[1, :3], whole[1, :3]]))
            np.testing.assert_array_equal(there[1, :8], np.concatenate([whole[0], whole[0]]))
