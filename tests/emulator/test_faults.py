"""What the emulator catches by itself: planted faults change values or are reported with their place."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import verbs
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends import cuda
from treeattn.backends.cuda import attention
from treeattn.backends.cuda.compile import source
from treeattn.backends.cuda.splits import Splits
from treeattn.backends.cuda.tables import VisibleTables

from .faults import FAULTS, faults_source, planted
from .raw_module import EmulatorError, RawModule, compiler_problem
from .runtime import EmulatorRuntime

pytestmark = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))


@pytest.fixture(scope="module")
def faults() -> RawModule:
    EmulatorRuntime().kernel("finish", "finish")  # another module is there before: they must not mix
    code = source("partial_attention") + faults_source()
    names = (
        *("divergent_barrier", "mask_names_absent_lanes", "caller_not_in_mask", "different_operations"),
        *("uninitialised_shared", "shared_race"),
    )
    return RawModule(code, name_expressions=names)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("divergent_barrier", r"deadlock in block \(0, 0, 0\): thread 0 waits at a block barrier, line \d+"),
        ("mask_names_absent_lanes", r"deadlock .* waits at a warp operation"),
        ("caller_not_in_mask", r"not in the warp mask: line \d+, block \(0, 0, 0\), thread 8"),
        ("different_operations", "different warp operations"),
    ],
)
def test_faults_of_control_flow_are_reported(faults: RawModule, name: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        faults.get_function(name)((1,), (64,), (np.zeros(64, np.float32),))


@pytest.mark.parametrize("name", ["uninitialised_shared", "shared_race"])
def test_shared_memory_starts_as_nan(faults: RawModule, name: str) -> None:
    x = np.zeros(64, np.float32)
    faults.get_function(name)((1,), (64,), (x,))
    assert np.isnan(x).any()


@pytest.fixture(autouse=True)
def _groups_of_eleven(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few the splits are, they are merged on two levels."""
    monkeypatch.setattr(attention, "choose_splits", lambda load, number: Splits(number, 11))


def records_of(kernel: str, seed: int, fault: str | None) -> np.ndarray:
    """Of two launches of one plan, the last one's. q lies where only narrow loads reach."""
    edit = planted(FAULTS[fault]) if fault else str
    runtime = EmulatorRuntime(seed=seed, edit=edit)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 1, 4, 65)).astype(np.float16)[..., 1:]
    k, v = (rng.standard_normal((1, 1500, 1, 64)).astype(np.float16) for _ in "kv")
    records = np.empty((1, 4, 1, 66), np.float32)
    planned = cuda.PlannedAttention(
        records, scale=0.125, num_splits=24, tensor_cores=kernel == "mma", runtime=runtime
    )
    for values in (k, v):  # what the first one leaves behind is nothing for the second one
        records[:] = 77
        planned(q, k, values)
    return records


def visible_records_of(kernel: str, seed: int, fault: str | None) -> np.ndarray:
    """Of three launches of one plan over other tables: five queries at places of their own, runs and drafts.
    What nobody sees is NaN; by multiply-add so is a value that one query sees, and the one beside it not."""
    runtime = EmulatorRuntime(seed=seed, edit=planted(FAULTS[fault]) if fault else str)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 5, 4, 64)).astype(np.float16)
    k, v = (rng.standard_normal((2, 1500, 2, 64)).astype(np.float16) for _ in "kv")
    visible = MaskTables(
        Rules(causal=True, window=(400, None), leading=9, alibi=(0.01, 0.02, 0.0, -0.01)), 2, 5
    )
    everything = np.empty((3, 2, 4, 5, 66), np.float32)
    records = everything[0].copy()
    planned = cuda.PlannedAttention(
        *(records,),
        scale=0.125,
        tables=visible,
        num_splits=5,
        tensor_cores=kernel == "mma",
        runtime=runtime,
    )
    for step, runs in enumerate(
        ([(0, 2, 700), (2000, 1, 800)], [(7, 1, 1500)], [(3, 3, 900), (4000, 1, 600)])
    ):
        mask = rng.random((2, 5, 70)) < 0.1
        visible.update(
            *(Runs(runs), 1500, [1500, 1300], [[500, 560, 90, 1200, 2100], [700, 40, 720, 2200, 2210]]),
            mask=mask,
            draft_positions=rng.integers(2000, 2100, (2, 70)),
        )
        keys, values = hide(visible, mask, k), hide(visible, mask, v)
        if kernel == "fma":
            values[0, visible.intervals[0, 1, 3] - 1] = np.nan
        planned(q, keys, values)
        everything[step] = records
    return everything


def hide(visible: MaskTables, mask: np.ndarray, array: np.ndarray) -> np.ndarray:
    """A copy with NaN in tokens that nobody sees."""
    seen = np.zeros(array.shape[:2], bool)
    for b, queries in enumerate(visible.intervals.tolist()):
        for first, first_end, second, second_end in queries:
            seen[b, first:first_end] = seen[b, second:second_end] = True
        begin = visible.draft_begins[b]
        seen[b, begin : begin + visible.drafts] = mask[b].any(axis=0)
    return np.where(seen[:, :, None, None], array, array.dtype.type(np.nan))


def cache_records_of(kernel: str, seed: int, fault: str | None) -> np.ndarray:
    """Of a paged cache of 8 bits; a value of it is NaN. One sequence goes on where it has no page."""
    runtime = EmulatorRuntime(seed=seed, edit=planted(FAULTS[fault]) if fault else str)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 8, 64)).astype(np.float16)
    k, v = (rng.standard_normal((40, 16, 2, 64)).astype("float8_e4m3fn") for _ in "kv")
    v[3, 4, 1, 5] = np.nan
    table = rng.permutation(40)[:36].astype(np.int32).reshape(2, 18)
    table[1, 15] = -1
    table[0, 2] = 3
    records = np.full((2, 8, 1, 66), 77, np.float32)
    planned = cuda.PlannedAttention(
        *(records,),
        scale=0.125,
        k_scale=[0.5, 2.0],
        v_scale=[3.0, 1.0],
        num_splits=1,
        tensor_cores=kernel == "mma",
        runtime=runtime,
    )
    planned(q, k, v, np.array([288, 250], np.int64), table)
    return records


def latent_records_of(kernel: str, seed: int, fault: str | None) -> np.ndarray:
    """Of a latent head: all tokens, by many tiles of them, then what five queries see of 300."""
    runtime = EmulatorRuntime(seed=seed, edit=planted(FAULTS[fault]) if fault else str)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 5, 3, 576)).astype(np.float16)
    k = rng.standard_normal((1, 300, 1, 576)).astype(np.float16)
    visible = MaskTables(Rules(window=(60, None), causal=True), 1, 5)
    visible.update(Runs([(0, 1, 300)]), 300, None, np.array([250, 40, 90, 20, 140]))
    everything = np.empty((2, 1, 3, 5, 514), np.float32)
    for records, seen in zip(everything, (None, visible), strict=True):
        verbs.attend(
            cuda,
            *(q, k, k[..., :512], records),
            scale=0.1,
            tables=seen,
            num_splits=2,
            runtime=runtime,
        )
    return everything


def tall_records_of(kernel: str, seed: int, fault: str | None) -> np.ndarray:
    """Of 57 queries, which are one tile of rows."""
    runtime = EmulatorRuntime(seed=seed, edit=planted(FAULTS[fault]) if fault else str)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 57, 1, 64)).astype(np.float16)
    k, v = (rng.standard_normal((1, 300, 1, 64)).astype(np.float16) for _ in "kv")
    records = np.full((1, 1, 57, 66), 77, np.float32)
    verbs.attend(cuda, q, k, v, records, scale=0.125, num_splits=4, runtime=runtime)
    return records


def apart_records_of(kernel: str, seed: int, fault: str | None) -> np.ndarray:
    """Of four latent heads, in more splits than a warp has lanes, most of them empty."""
    runtime = EmulatorRuntime(seed=seed, edit=planted(FAULTS[fault]) if fault else str)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 1, 4, 576)).astype(np.float16)
    k = rng.standard_normal((1, 300, 1, 576)).astype(np.float16)
    records = np.full((1, 4, 1, 514), 77, np.float32)
    verbs.attend(cuda, q, k, k[..., :512], records, scale=0.1, num_splits=41, runtime=runtime)
    return records


def many_latent_records_of(kernel: str, seed: int, fault: str | None) -> np.ndarray:
    """Of a latent head with 70 rows: a tile of 64, and what is left of another."""
    runtime = EmulatorRuntime(seed=seed, edit=planted(FAULTS[fault]) if fault else str)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 35, 2, 576)).astype(np.float16)
    k = rng.standard_normal((1, 100, 1, 576)).astype(np.float16)
    records = np.full((1, 2, 35, 514), 77, np.float32)
    verbs.attend(cuda, q, k, k[..., :512], records, scale=0.1, num_splits=3, runtime=runtime)
    return records


RECORDS_OF = {
    "plain": records_of,
    "tables": visible_records_of,
    "cache": cache_records_of,
    "latent": latent_records_of,
    "tall": tall_records_of,
    "many_latent": many_latent_records_of,
    "apart": apart_records_of,
}


def run(fault: str | None, kernel: str, seed: int, kind: str) -> np.ndarray:
    """The bits of what a kernel leaves."""
    return RECORDS_OF[kind](kernel, seed, fault).view(np.uint32)


def is_seen(fault: str, seed: int, good: np.ndarray) -> bool:
    """By other records, or by what the emulator says."""
    try:
        return bool((run(fault, FAULTS[fault].kernel, seed, FAULTS[fault].kind) != good).any())
    except EmulatorError as error:
        return "g++" not in str(error)


# These change no value here, or end the process: see test_sanitizers.py.
SILENT = (
    "no_fence",
    "no_views_barrier",
    "no_arrival_barrier",
    "query_always_by_vectors",
    "misaligned_scratch",
)


# Those of pull_partials.cu have a test of their own.
OF_ATTENTION = [name for name, fault in FAULTS.items() if fault.kernel != "pull"]


@pytest.mark.deep
@pytest.mark.parametrize("fault", [name for name in OF_ATTENTION if name not in SILENT])
def test_faults_are_seen(fault: str) -> None:
    good = run(None, FAULTS[fault].kernel, 0, FAULTS[fault].kind)
    assert any(is_seen(fault, seed, good) for seed in range(8))


@pytest.mark.parametrize("kernel", ["fma", "mma"])
def test_without_a_fault_nothing_is_invalid(kernel: str) -> None:
    assert np.isfinite(records_of(kernel, 0, None)).all()
    invalid = np.isnan(visible_records_of(kernel, 0, None))
    assert invalid[:, 0, :, 1, 2:].all() == (kernel == "fma")
    invalid[:, 0, :, 1, 2:] = False
    assert not invalid.any()


def test_tables_of_the_last_step_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's part: what changed has to be uploaded."""
    good = visible_records_of("fma", 0, None)
    fill = VisibleTables.fill
    monkeypatch.setattr(VisibleTables, "fill", lambda tables: tables.steps or fill(tables))
    assert (visible_records_of("fma", 0, None).view(np.uint32) != good.view(np.uint32)).any()
