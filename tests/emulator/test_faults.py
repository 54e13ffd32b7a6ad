"""What the emulator catches by itself: planted faults change values or are reported with their place."""

from __future__ import annotations

import numpy as np
import pytest

from treeattn.backends import cuda
from treeattn.backends.cuda import attention
from treeattn.backends.cuda.compile import source
from treeattn.backends.cuda.splits import Splits

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


def is_seen(fault: str, seed: int, good: np.ndarray) -> bool:
    """By other records, or by what the emulator says."""
    try:
        return bool((records_of(FAULTS[fault].kernel, seed, fault) != good).any())
    except EmulatorError as error:
        return "g++" not in str(error)


# These change no value here, or end the process: see test_sanitizers.py.
SILENT = ("no_fence", "no_arrival_barrier", "query_always_by_vectors", "misaligned_scratch")


# Those of pull_partials.cu have a test of their own.
OF_ATTENTION = [name for name, fault in FAULTS.items() if fault.kernel in ("fma", "mma")]


@pytest.mark.parametrize("fault", [name for name in OF_ATTENTION if name not in SILENT])
def test_faults_are_seen(fault: str) -> None:
    good = records_of(FAULTS[fault].kernel, 0, None)
    assert np.isfinite(good).all()
    assert any(is_seen(fault, seed, good) for seed in range(8))
