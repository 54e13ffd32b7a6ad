"""What the emulator catches by itself: planted faults change values or are reported with their place."""

from __future__ import annotations

import numpy as np
import pytest

from treeattn.backends.cuda import attention
from treeattn.backends.cuda.compile import source
from treeattn.backends.cuda.splits import Splits
from treeattn.backends.cuda.tables import VisibleTables

from .faults import FAULTS, faults_source, planted
from .raw_module import EmulatorError, RawModule
from .runtime import EmulatorRuntime
from .work import WORK


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


def run(fault: str | None, kernel: str, seed: int, kind: str) -> np.ndarray:
    """The bits of what a kernel leaves."""
    runtime = EmulatorRuntime(seed=seed, edit=planted(FAULTS[fault]) if fault else str)
    return WORK[kind](runtime, kernel, False).view(np.uint32)


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
    "no_views_barrier_rows",
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
    assert np.isfinite(WORK["plain"](EmulatorRuntime(), kernel, False)).all()
    invalid = np.isnan(WORK["tables"](EmulatorRuntime(), kernel, False))
    assert invalid[:, 0, :, 1, 2:].all() == (kernel == "fma")
    invalid[:, 0, :, 1, 2:] = False
    assert not invalid.any()


def test_tables_of_the_last_step_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's part: what changed has to be uploaded."""
    good = run(None, "fma", 0, "tables")
    fill = VisibleTables.fill
    monkeypatch.setattr(VisibleTables, "fill", lambda tables: tables.steps or fill(tables))
    assert (run(None, "fma", 0, "tables") != good).any()
