"""What queries see, on the emulator: tables that follow the steps, and nothing that is not seen."""

import itertools
from typing import Any

import numpy as np
import pytest

import treeattn
from tests.support import arguments
from tests.support.attention_contract import bits
from tests.support.drawn import FACTOR
from tests.support.exporters import OnGpu
from tests.support.problems import draw
from treeattn.attention.arguments import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends import cuda
from treeattn.backends.cuda import attention, cupy_runtime
from treeattn.backends.cuda.splits import Splits
from treeattn.backends.cuda.tables import VisibleTables, find_spans
from treeattn.backends.cuda.variants import HEAD_DIMS
from treeattn.errors import ArgumentError

from .cases import Case
from .runtime import CountingRuntime, EmulatorRuntime

Array = np.ndarray[Any, Any]


def test_spans_are_what_pieces_cover_together() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        tiles, n = rng.integers(1, 4), rng.integers(1, 6)
        begin = rng.integers(0, 30, (tiles, n))
        pieces = np.stack([begin, begin + rng.integers(-1, 9, (tiles, n)).clip(0)], axis=-1)
        spans = find_spans(pieces)
        assert spans.counts.sum() == len(spans.begin) == len(spans.end)
        at = 0
        for tile, count in zip(pieces.tolist(), spans.counts.tolist(), strict=True):
            covered = sorted({token for b, e in tile for token in range(b, e)})
            found = [
                list(range(*pair))
                for pair in zip(spans.begin[at:][:count], spans.end[at:][:count], strict=True)
            ]
            assert [token for span in found for token in span] == covered
            assert all(last[-1] + 1 < following[0] for last, following in itertools.pairwise(found))
            at += count


def test_one_query_has_the_tables_of_many() -> None:
    """The short way of a step with one query ends where the long one does."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        visible = MaskTables(Rules(), 1, 1)
        tables = VisibleTables(visible, EmulatorRuntime(), 4, group=4, rows=4, step=16)
        visible.drafts = int(rng.choice([0, 3]))
        visible.draft_begins[0] = rng.choice([60, 90])
        cuts = np.sort(rng.integers(0, 61, 4))
        visible.intervals[0, 0] = rng.choice([cuts, [0, 0, *cuts[2:]], cuts * 0, cuts[[0, 1, 1, 3]]])
        found = []
        for fill in (tables.fill, tables.fill_one):
            tables._host[:] = 0
            fill()
            found.append((tables._host.tobytes(), tables.steps, tables.end))
        assert found[0] == found[1]


def shaped(*shape: int) -> Array:
    """An array of any size in the memory of one row."""
    return np.broadcast_to(np.zeros(shape[-1], np.float16), shape)


@pytest.mark.parametrize("queries", [1, 16])
def test_a_window_launches_for_the_window(queries: int) -> None:
    splits = []
    for tokens, window in ((1 << 20, 4095), (4096, None)):
        runtime = CountingRuntime()
        visible = MaskTables(Rules(window=(window, None), causal=True), 1, queries)
        records = np.zeros((1, 8, queries, 130), np.float32)
        planned = cuda.PlannedAttention(records, scale=1.0, tables=visible, runtime=runtime)
        visible.update(Runs([(0, 1, tokens)]), tokens, None, np.full(queries, tokens - 1))
        planned(shaped(1, queries, 8, 128), *(shaped(1, tokens, 8, 128),) * 2)
        splits.append((runtime.splits, planned.load.step))
    assert splits[0] == splits[1]
    assert splits[0][0][0] > 1


def test_only_what_changed_is_uploaded_and_nothing_allocated() -> None:
    runtime = CountingRuntime()
    visible = MaskTables(Rules(causal=True), 1, 4)
    records = np.zeros((1, 2, 4, 66), np.float32)
    planned = cuda.PlannedAttention(records, scale=1.0, tables=visible, num_splits=3, runtime=runtime)
    q, k = shaped(1, 4, 2, 64), shaped(1, 5000, 2, 64)
    runs, drafts = Runs([(0, 1, 5000)]), np.ones((1, 4, 70), bool)
    visible.update(runs, 5000, None, np.arange(4), drafts, np.zeros((1, 70), int))
    planned(q, k, k)
    uploads, allocations = runtime.uploads, runtime.allocations
    assert uploads == 2  # the tables, and what they refer to
    planned(q, k, k)
    assert runtime.uploads == uploads
    for start in range(1, 4000, 7):
        visible.draft_begins[0] = start + 4
        visible.intervals[..., 3] = np.arange(start, start + 4)
        planned(q, k, k)
    assert runtime.uploads == uploads + len(range(1, 4000, 7))
    assert runtime.allocations == allocations
    visible.update(runs, 5000, None, np.arange(4), drafts[..., :69], np.zeros((1, 69), int))
    planned(q, k, k)
    assert runtime.uploads == uploads + len(range(1, 4000, 7)) + 2
    assert runtime.allocations == allocations
    visible.draft_begins[0] -= 1
    with pytest.raises(ArgumentError, match="make one step before the capture, and refresh"):
        runtime.capture(lambda: planned(q, k, k))


def case_of(kernel: str) -> Case:
    """Two sequences of 5 queries and 4 heads that share a KV head: float32 for the multiply-add kernel."""
    dtype = "float32" if kernel == "fma" else "float16"
    return Case(dtype, 64, group=4, kv_heads=1, queries=5, batch=2, tokens=900, splits=3)


def test_nan_that_one_query_sees_stays_with_it() -> None:
    """By multiply-add; tensor cores multiply all rows of a tile with all of its values."""
    q, k, v, _, _ = case_of("fma").inputs()
    visible, runs = MaskTables(Rules(causal=True), 2, 5), Runs([(0, 1, 900)])
    records = np.zeros((2, 4, 5, 66), np.float32)
    planned = cuda.PlannedAttention(records, scale=0.125, tables=visible, runtime=EmulatorRuntime())
    visible.update(runs, 900, None, np.array([100, 500, 101, 102, 103]))
    planned(q, k, v)
    clean = records.copy()
    k[0, 104], v[0, 105], v[1, 500] = np.nan, np.nan, np.nan
    planned(q, k.copy(), v)
    assert np.isnan(records[:, :, 1, 2:]).all()
    others = [0, 2, 3, 4]
    assert (bits(records[:, :, others].copy()) == bits(clean[:, :, others].copy())).all()


def test_lengths_on_the_gpu_become_part_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_runtime, "current", lambda: EmulatorRuntime())
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 2, 64)).astype(np.float32) for n in (1, 90, 90))
    given = {"device": "cuda", "rules": treeattn.Rules(window=(30, 0)), "q_positions": np.array([70])}
    there = OnGpu(np.array([90, 61], np.int64))
    found = [array.copy() for array in treeattn.decode(q, k, v, lengths=there, **given)]
    for array, wanted in zip(found, treeattn.decode(q, k, v, lengths=[90, 61], **given), strict=True):
        assert (bits(array) == bits(wanted)).all()


def test_tables_of_other_tiles_are_others() -> None:
    """The same plan with another kernel, as arrays of another type ask for it."""
    visible = MaskTables(Rules(causal=True), 1, 4)
    visible.update(Runs([(0, 1, 90)]), 90, None, np.arange(4))
    runtime = CountingRuntime()
    planned = cuda.PlannedAttention(
        np.zeros((1, 2, 4, 66), np.float32), scale=1.0, tables=visible, runtime=runtime
    )
    steps = []
    for dtype in (np.float16, np.float32, np.float16):
        q, k = np.zeros((1, 4, 2, 64), dtype), np.zeros((1, 90, 2, 64), dtype)
        planned(q, k, k)
        steps.append(planned.load.step)
        assert isinstance(planned._tables, VisibleTables)
        assert planned._tables.tiling["step"] == planned.load.step
    assert steps[0] != steps[1]


@pytest.mark.parametrize("kernel", ["fma", "mma"])
def test_a_captured_step_sees_anew(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay has the bits of a call: with lengths, q_positions and runs of its own, and the same graph.
    Other steps of the decoder, over a shorter cache, change nothing of it."""
    runtime = EmulatorRuntime()
    monkeypatch.setattr(cupy_runtime, "current", lambda: runtime)
    monkeypatch.setattr(
        attention, "choose_splits", lambda load, number: Splits(3, 2)
    )  # a graph keeps its own
    rng = np.random.default_rng(0)
    case = case_of(kernel)
    q, k, v, _, _ = case.inputs()
    rules = treeattn.Rules(causal=True, window=(300, 0), leading=5, alibi=[0.01, 0.3, -0.01, 0.0])
    decoder, other = (treeattn.Decoder(**case.plan, rules=rules) for _ in range(2))
    lengths, runs = np.array([900, 700]), [(0, 2, 400), (4000, 1, 500)]
    given = {"q_positions": rng.integers(3900, 4500, (2, 5)), "positions": runs}

    def called(verb: Any) -> Any:
        return verb(q, treeattn.Shard(k, v, lengths, given["positions"]), q_positions=given["q_positions"])

    step = called(decoder.capture)
    launches = runtime.launches
    for number in range(4):
        few = treeattn.Shard(k[:, :60], v[:, :60], [60, 3], [(7, 1, 60)])
        decoder(q, few, q_positions=np.arange(5))
        if number % 2:
            lengths[:] = rng.integers(100, 901, 2)  # in place
            given = {**given, "q_positions": rng.integers(0, 5000, (2, 5))}
        else:
            given = {"q_positions": np.array([3, 999, 50, 200, 0]), "positions": [(number, 1, 900)]}
        wanted = [array.copy() for array in called(other)]
        before = runtime.launches
        for array, bits_of in zip(step(**given), wanted, strict=True):
            assert (bits(array) == bits(bits_of)).all()
        assert runtime.launches == before
    assert runtime.launches > launches
    with pytest.raises(ArgumentError, match="must lie between 0 and the shard's 900"):
        step([901, 3])
    with pytest.raises(ArgumentError, match="q_positions have shape"):
        step(q_positions=np.arange(4))


def test_a_captured_step_takes_masks_where_it_had_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_runtime, "current", EmulatorRuntime)
    rng = np.random.default_rng(0)
    case = case_of("fma")
    q, k, v, _, _ = case.inputs()
    decoder, other = (treeattn.Decoder(**case.plan) for _ in range(2))
    plain = decoder.capture(q, k, v)
    with pytest.raises(ArgumentError, match="captured without rules, mask or begins"):
        plain(mask=np.ones((2, 5, 3), bool))
    with pytest.raises(ArgumentError, match="captured without rules, mask or begins"):
        plain([3, 4])
    step = decoder.capture(q, k, v, mask=np.ones((2, 5, 3), bool))
    for drafts in (3, 70, 9):
        mask = rng.random((2, 5, drafts)) < 0.5
        wanted = [array.copy() for array in other(q, k, v, mask=mask)]
        for array, bits_of in zip(step(mask=mask), wanted, strict=True):
            assert (bits(array) == bits(bits_of)).all()


def is_served(case: Any, kind: str) -> bool:
    """By kernels of a GPU."""
    if kind == "latent":
        return case.q.dtype.itemsize == 2
    return case.q.shape[3] in HEAD_DIMS and case.q.dtype != np.float64


@pytest.mark.parametrize("kind", ["plain", "8 bits", "latent"])
def test_drawn_cases_are_exact_and_a_decoder_has_their_bits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank: the cases of tests/mpi/test_visible.py that a GPU serves. The decoder's step comes after one
    over other lengths and positions, which leaves tables of its own behind; then it is captured."""
    runtime = EmulatorRuntime()
    monkeypatch.setattr(cupy_runtime, "current", lambda: runtime)
    served = (case for case in (draw(seed, 1, 700) for seed in itertools.count(100)) if is_served(case, kind))
    for seed, case in enumerate(itertools.islice(served, 5 * FACTOR)):
        case = {"plain": case, "8 bits": case.in_8_bits(seed), "latent": case.wide_latent()}[kind]
        given = case.shard(0)
        if kind == "8 bits" and seed % 2:
            given |= {"dtype": case.k.dtype.name, **{name: given[name].view(np.uint8) for name in "kv"}}
        out, lse = treeattn.decode(device="cuda", **arguments.call(**given))
        wanted_out, wanted_lse, out_bound, lse_bound = case.expected()
        batch, queries, heads, head_dim = case.q.shape
        if case.q.dtype != np.float32 and (case.v_dim or heads // case.k.shape[2] * queries >= 4):
            values = np.abs(np.concatenate([case.v, case.drafts[1]], 1).astype(float))
            largest = (values * (1 if case.scales is None else case.scales[1][:, None])).max(initial=0)
            out_bound = max(out_bound, 4e-3 * largest)
        where = f"seed {seed}, {case.rules}, q {case.q.shape} {case.q.dtype}, k {case.k.shape} {case.k.dtype}"
        np.testing.assert_allclose(out, wanted_out, rtol=0, atol=out_bound, err_msg=where)
        np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=lse_bound, err_msg=where)
        shape = {"batch": batch, "queries": queries, "heads": heads, "kv_heads": case.k.shape[2]}
        shape |= {"head_dim": head_dim, "dtype": case.q.dtype.name, "page_size": case.page_size or None}
        shape |= {"cache_dtype": case.k.dtype.name, "v_dim": case.v_dim or None}
        shape |= {name: given.pop(name) for name in ("k_scale", "v_scale") if name in given}
        step = {name: one for name, one in given.items() if name not in case.rules}
        for name in ("scale", "v_dim", "dtype"):
            step.pop(name, None)
        fewer = {
            "lengths": np.maximum(given["lengths"] // 2, case.mask.shape[2]),
            "q_positions": np.zeros(queries, int),
        }
        plan = arguments.plan(**shape, scale=case.scale, device="cuda", **case.rules)
        with treeattn.Decoder(**plan) as decoder:
            decoder(**arguments.call(**step | fewer))
            found = [[array.copy() for array in decoder(**arguments.call(**step))]]
            if not case.page_size:
                found.append(decoder.capture(**arguments.call(**step))())
            for results in found:
                for array, one in zip(results, (out, lse), strict=True):
                    assert (bits(array) == bits(one)).all(), where
