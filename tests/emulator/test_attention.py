"""The attention kernels on the emulator: what every backend promises, and what a launch does."""

import itertools
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import treeattn
from tests.support.attention_contract import PLAIN, bits, zeros
from tests.support.drawn import sample
from tests.support.gpu_contract import GpuContract
from tests.support.pages import in_pages
from treeattn.attention.arguments import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends import cuda
from treeattn.backends.cuda import attention, variants
from treeattn.backends.cuda.splits import Splits, choose_splits
from treeattn.errors import ArgumentError, BackendError

from .cases import CASES, Case, Inputs, is_tensor_core_case
from .runtime import CountingRuntime, EmulatorRuntime

Array = np.ndarray[Any, Any]


class TestOnTheEmulator(GpuContract):
    cases = sample(8, CASES)

    def runtime(self, seed: int = 0, **device: Any) -> EmulatorRuntime:
        return EmulatorRuntime(seed=seed, **device)

    def roomy(self, seed: int = 0) -> EmulatorRuntime:
        runtime = self.runtime(seed)
        runtime.multiprocessors = 132
        return runtime


CONTRACT = TestOnTheEmulator()
attend, refused = CONTRACT.attend, CONTRACT.refused


MANY = [
    *(Case("float32", d, group=group, tokens=500, splits=13) for d, group in ((64, 4), (80, 1), (256, 2))),
    *(Case("bfloat16", d, group=group, tokens=1000, splits=13) for d, group in ((64, 4), (96, 7), (128, 16))),
    Case("float32", 64, group=3, queries=3, kv_heads=1, batch=2, tokens=400, lengths=(400, 90), splits=29),
]


@pytest.mark.parametrize(("case", "fan"), sample(4, itertools.product(MANY, [2, 5, 12])), ids=str)
def test_splits_merge_on_two_levels(case: Case, fan: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the same partial, and the same bits whichever block is last."""
    monkeypatch.setattr(attention, "choose_splits", lambda load, number: Splits(number, fan))
    records = [attend(case, order=seed) for seed in (0, 1, 2)]
    assert (bits(records[0]) == bits(records[1])).all()
    assert (bits(records[0]) == bits(records[2])).all()
    case.check(*CONTRACT.results(records[0]), is_tensor_core_case(case))


def test_a_device_with_little_shared_memory_takes_the_multiply_add_kernel() -> None:
    case = Case("bfloat16", 64, group=4, splits=2)
    small = attend(case, runtime=EmulatorRuntime(shared_bytes=30 << 10))
    assert (bits(small) == bits(attend(case, tensor_cores=False))).all()


def test_a_growing_cache_chooses_its_splits_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passed as a new view in each step: choosing costs more than all else that a step does on the host."""
    considered: list[int] = []

    def counted(load: Any, *given: Any) -> Any:
        considered.append(load.tokens)
        return choose_splits(load, *given)

    monkeypatch.setattr(attention, "choose_splits", counted)
    q, cache = np.zeros((1, 1, 2, 64), np.float32), np.zeros((1, 5000, 2, 64), np.float32)
    planned = cuda.PlannedAttention(np.zeros((1, 2, 1, 66), np.float32), scale=1.0, runtime=CountingRuntime())
    for tokens in range(2, 5001):
        planned(q, cache[:, :tokens], cache[:, :tokens])
    assert considered[:4] == [2, 33, 65, 97]  # at each step of 32 tokens, then at each second one, and so on
    assert len(considered) == 63 + 33 + 8


def test_a_growing_cache_goes_on_with_another_kernel() -> None:
    """Where there come to be more tokens than eight blocks are for, or fewer: the bits of a fresh plan."""
    case, chosen = Case("bfloat16", 64, group=4, kv_heads=1, tokens=2100), []
    planned, records = CONTRACT.planned(case, runtime=(roomy := CONTRACT.roomy()))
    q, k, v, *_ = case.inputs()
    load, loaded = roomy.kernel, {}
    roomy.kernel = lambda *kernel: (loaded.setdefault(kernel, len(chosen)), load(*kernel))[1]
    for tokens in (200, 300, 2048, 2049, 700):
        planned(q, k[:, :tokens], v[:, :tokens])
        chosen.append(planned.variant.clustered)
        fresh = replace(case, tokens=tokens), Inputs(q, k[:, :tokens], v[:, :tokens], None, None)
        assert (bits(attend(*fresh, runtime=CONTRACT.roomy())) == bits(records)).all()
    assert chosen == [False, True, True, False, True]
    assert list(loaded.values()) == [0, 0]  # both before the first step
    planned, _ = CONTRACT.planned(replace(case, splits=8), runtime=CONTRACT.roomy())
    planned(q, k[:, :300], v[:, :300])
    assert not planned.variant.clustered  # whoever asks for a count gets it by whichever device


def test_new_views_bind_as_fresh_arrays_do() -> None:
    """What is kept from step to step must not show in what is launched."""
    rng, runtime = np.random.default_rng(3), CountingRuntime()
    records = np.zeros((1, 4, 1, 66), np.float32)
    planned = cuda.PlannedAttention(records, scale=0.5, runtime=runtime)
    many_q, cache = np.zeros((9, 1, 1, 4, 64), np.float16), np.zeros((2, 1, 900, 5, 64), np.float16)
    odd_q = np.zeros(4 * 64 + 1, np.float16)[1:].reshape(1, 1, 4, 64)
    for _ in range(300):
        heads, tokens, lengths = rng.choice([1, 2, 4]), rng.choice([0, 1, 2, 64, 65, 900]), None
        k, v = (array[:, :tokens, :heads] for array in cache[:: rng.choice([1, -1])])
        q = odd_q if rng.random() < 0.3 else many_q[rng.integers(9)]
        if rng.random() < 0.5:
            lengths = np.array([3])
        planned(q, k, v, lengths)
        fresh = cuda.PlannedAttention(records, scale=0.5, runtime=runtime)
        fresh(q, k, v, lengths)
        for name in "numerators", "states", "counters":  # each plan's workspace is its own
            fresh._arguments["scratch"][name] = planned._arguments["scratch"][name]
        for name in planned._arguments.dtype.names:
            assert (planned._arguments[name] == fresh._arguments[name]).all(), name
        assert runtime.splits[-1] == runtime.splits[-2]


def test_a_view_that_is_laid_out_alike_is_still_refused() -> None:
    q, cache = np.zeros((1, 1, 2, 64), np.float32), np.zeros(2 * 900 * 2 * 64 + 1, np.float32)
    aligned, odd = (cache[i : i + 900 * 2 * 64].reshape(1, 900, 2, 64) for i in (0, 1))
    planned = cuda.PlannedAttention(np.zeros((1, 2, 1, 66), np.float32), scale=1.0, runtime=CountingRuntime())
    planned(q, aligned, aligned)
    for k, v, name in ((odd, aligned, "k"), (aligned, odd, "v")):
        with pytest.raises(ArgumentError, match=f"rows of {name} must begin at multiples of 16"):
            planned(q, k, v)
    with pytest.raises(ArgumentError, match="lengths are int32"):
        planned(q, aligned[:, :7], aligned[:, :7], np.zeros(1, np.int32))
    with pytest.raises(ArgumentError, match="not a numpy.ndarray"):
        planned(q, aligned.tolist(), aligned)


def of_shape(*shape: int) -> Array:
    """An array of any size in the memory of one row."""
    return np.broadcast_to(np.zeros(shape[3], np.float32), shape)


def looking_at(tokens: int) -> MaskTables:
    visible = MaskTables(Rules(), 1, 1)
    visible.update(Runs([(0, 1, tokens)]), tokens)
    return visible


UNALIGNED = np.zeros(1 + 9 * 2 * 64, np.float32)[1:].reshape(1, 9, 2, 64)
assert UNALIGNED.ctypes.data % 16


def row(tokens: int, head_dim: int, dtype: Any = np.float32) -> Array:
    return zeros(1, tokens, 2, head_dim, dtype=dtype)


def records_of(heads: int, head_dim: int, batch: int = 1) -> dict[str, Array]:
    return {"records": np.zeros((batch, heads, 1, head_dim + 2), np.float32)}


PAGES = zeros(5, 16, 2, 64)
PAGED = {"k": PAGES, "v": PAGES, "block_table": zeros(1, 3, dtype=np.int32)}
NARROW = PAGED | dict.fromkeys("kv", PAGES.astype("float8_e5m2"))
ODD_BYTES = np.zeros(1 + 2 * 256, np.uint8)[1:].view(np.float32).reshape(1, 1, 2, 64)
LATENT = {"q": row(1, 576), "k": row(9, 576), "v": row(9, 512), **records_of(2, 512)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": row(9, 64, dtype=np.float64)}, "device='cpu'"),
        ({"v": row(9, 128)[..., ::2]}, "last axis of v.*ascontiguous"),
        ({"q": row(1, 128)[..., ::2]}, "last axis of q.*ascontiguous"),
        ({"q": ODD_BYTES}, "rows of q must begin at multiples of 4 bytes"),
        ({"k": UNALIGNED}, "rows of k must begin at multiples of 16 bytes"),
        ({"v": row(9, 66)[..., :64]}, "multiples of 16 bytes"),
        ({"records": np.zeros((1, 2, 1, 66), np.float64)}, "float32"),
        ({"lengths": np.zeros(1, np.int32)}, "int64"),
        ({"lengths": [9]}, "list"),
        ({"num_splits": 0}, "num_splits"),
        ({"tables": looking_at(10)}, "see up to 10 tokens, but k and v have 9"),
        (
            {x: of_shape(2, 1, 2, 64) for x in "qkv"}
            | records_of(2, 64, batch=2)
            | {"lengths": np.zeros(4, np.int64)[::2]},
            "contiguous int64",
        ),
        (dict.fromkeys("kv", of_shape(1, 2**31 - 64, 2, 64)), "2147483584 tokens: fewer"),
        (
            {x: of_shape(65536, 1, 2, 64) for x in "qkv"} | records_of(2, 64, batch=65536),
            "batch 65536.*at most 65535",
        ),
        (
            {x: of_shape(1, 1, 65536, 64) for x in "qkv"} | records_of(65536, 64),
            "65536 heads are too many for one launch",
        ),
        (LATENT, "values of 512 channels are the first ones of the keys: pass v=None and v_dim=512"),
        # Caches of 8 bits, and in pages.
        (NARROW, "needs k_scale and v_scale"),
        (NARROW | {"k_scale": [1.0] * 3, "v_scale": 1.0}, r"k_scale has shape \[3\]: one .*\[2\]"),
        ({"k_scale": 1.0}, "are for caches of 8 bits, not of float32"),
        ({"k_scale": np.nan}, "k_scale must be finite"),
        ({"v_scale": "x"}, "v_scale must be a number, or one for each"),
        ({"kv_dtype": "int8"}, "kv_dtype 'int8' is unknown: use one of .*, float8_e4m3fn, float8_e5m2"),
        (dict.fromkeys("kv", PAGES[:1].astype(np.uint8)), "k is uint8: on the GPU"),
        ({"q": zeros(1, 1, 2, 64, dtype="float8_e5m2")}, "q is float8_e5m2"),
        (PAGED | {"block_table": zeros(2, 3, dtype=np.int32)}, r"int32 \[batch, pages\] = \[1, any\]"),
        (PAGED | {"block_table": zeros(1, 3, dtype=np.int64)}, "the block table is int64"),
        (PAGED | {"block_table": [[0]]}, "block_table is a list"),
        (
            PAGED | {"q": zeros(2, 1, 2, 64), **records_of(2, 64, batch=2)},
            r"\[1, 3\]: contiguous int32 .* \[2, any\]",
        ),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        refused(**change)


@pytest.mark.parametrize(
    ("k_dim", "v_dim", "message"),
    [
        (64, 56, "keys of 64 and values of 56 channels.*576 and 512"),
        (72, 72, "head_dim 72: there are 64, 80"),
    ],
)
def test_what_no_kernel_serves_is_refused(k_dim: int, v_dim: int, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        refused(q=row(1, k_dim), k=row(9, k_dim), v=row(9, v_dim), **records_of(2, v_dim))


def test_a_captured_plan_follows_its_block_table() -> None:
    case, runtime, lengths = Case("float32", 64, batch=2, splits=3), EmulatorRuntime(), np.array([150, 111])
    q, k, v, _, _ = case.inputs()
    (pages, table), (values, _) = in_pages(k, 16), in_pages(v, 16)
    planned, records = CONTRACT.planned(case, runtime=runtime)
    planned(q, pages, values, lengths, table)
    first, graph = records.copy(), runtime.capture(lambda: planned(q, pages, values, lengths, table))
    table[...] = table[::-1].copy()
    wanted = attend(case, Inputs(q, pages, values, lengths, None), table=table.copy())
    graph()
    assert (bits(records) == bits(wanted)).all()
    assert not (bits(records) == bits(first)).all()


class Allocating(EmulatorRuntime):
    """A larger device, which remembers what it allocated for as long as someone else does."""

    multiprocessors = 40

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[weakref.ref[Array]] = []

    def zeros(self, size: int, dtype: Any) -> Any:
        array = super().zeros(size, dtype)
        self.allocated += [weakref.ref(array)] * bool(size)
        return array


def test_workspace_of_a_captured_graph_outlives_a_larger_cache() -> None:
    """The graph goes on to write where the splits were when it was captured."""
    runtime, small, large = Allocating(), Case("float32", 64, tokens=300), Case("float32", 64, tokens=3000)
    planned, records = CONTRACT.planned(small, runtime=runtime)
    q, k, v, _, _ = small.inputs()
    planned(q, k, v)
    first = records.copy()
    graph = runtime.capture(lambda: planned(q, k, v))
    planned(*large.inputs()[:3])
    assert len(runtime.allocated) == 3  # splits and counters, then larger splits
    assert [array() for array in runtime.allocated if array() is None] == []
    records[:] = 77
    graph()
    assert (bits(records) == bits(first)).all()


class FullDevice(EmulatorRuntime):
    """Out of memory as long as `full`."""

    full = False

    def zeros(self, size: int, dtype: Any) -> Any:
        if self.full and size:
            raise BackendError("out of GPU memory")
        return super().zeros(size, dtype)


def test_a_plan_outlives_a_lack_of_memory() -> None:
    case, runtime = PLAIN[0], FullDevice()
    q, k, v, _, _ = case.inputs()
    planned, records = CONTRACT.planned(case, runtime=runtime)
    runtime.full = True
    for _ in range(2):
        with pytest.raises(BackendError, match="out of GPU memory"):
            planned(q, k, v)
    assert (records == 77).all()
    runtime.full = False
    planned(q, k, v)
    case.check(*CONTRACT.results(records), tensor_cores=False)


def latent(tokens: int) -> Case:
    return Case("float16", 576, v_dim=512, kv_heads=1, group=16, tokens=tokens)


def test_stages_are_as_many_as_fit() -> None:
    """By the shared memory of a block on sm_75, 86, 80 and 90."""
    kernels = [variants.mma_kernel("float16", "float16", 576, 16, kib << 10) for kib in (64, 99, 163, 227)]
    assert kernels[0] is None
    assert [kernel.expression[-2] for kernel in kernels[1:] if kernel] == ["2", "3", "2"]


def test_many_heads_are_one_tile_where_shared_memory_holds_it() -> None:
    """Of 64 rows by eight warps, on sm_80 and 90; on sm_86 of 32."""
    kernels = [variants.mma_kernel("float16", "float16", 576, 128, kib << 10) for kib in (64, 99, 163, 227)]
    assert [(kernel.rows, kernel.threads) for kernel in kernels[1:] if kernel] == [(32, 128)] + [
        (64, 256)
    ] * 2


@pytest.mark.parametrize(("splits", "launches"), [(1, 1), (5, 2)])
def test_splits_are_merged_by_many_blocks(splits: int, launches: int) -> None:
    """One for each row and 64 channels, in a launch of its own."""
    q, k, *_ = latent(200).inputs()
    runtime, records = EmulatorRuntime(), np.zeros((1, 16, 1, 514), np.float32)
    planned = cuda.PlannedAttention(records, scale=1.0, num_splits=splits, runtime=runtime)
    planned(q, k, k[..., :512])
    assert (planned.load.merging, runtime.launches) == (16 * 8, launches)


def test_what_cannot_be(runtime: EmulatorRuntime) -> None:
    q, k, *_ = latent(9).inputs()
    with pytest.raises(ArgumentError, match="the first ones of the keys: pass v=None and v_dim=512"):
        treeattn.decode(q, k, k[..., :512].copy(), device="cuda", scale=1.0)
    with pytest.raises(BackendError, match="keys of 192 and values of 128 channels.*576 and 512"):
        treeattn.decode(q[..., :192], k[..., :192], k[..., :128], device="cuda")
    for query, keys in ((q.astype(np.float32), k.astype(np.float32)), (q, k.astype(np.float32))):
        with pytest.raises(
            BackendError, match=r"latent attention with q of float\d\d and a cache of float32: it"
        ):
            treeattn.decode(query, treeattn.Shard(keys, v_dim=512), device="cuda", scale=1.0)
    with pytest.raises(BackendError, match="keys of 576 and values of 64"):
        treeattn.Decoder(
            heads=16, kv_heads=1, head_dim=576, cache=treeattn.CacheFormat(v_dim=64), scale=1.0, device="cuda"
        )
