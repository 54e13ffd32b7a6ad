"""What the emulator catches by itself: planted faults change values or are reported with their place."""

from collections.abc import Callable

import numpy as np
import pytest

from treeattn.backends.cuda import attention
from treeattn.backends.cuda.compile import source
from treeattn.backends.cuda.splits import Splits

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


# These change no value here, or end the process: see test_sanitizers.py.
SILENT = ("no_fence", "no_arrival_barrier", "relaxed_cluster")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("not_begun", "reads the shared memory of one that need not have begun: line"),
        ("ended_early", "has ended: line|ends while others of its cluster may read its shared memory"),
        ("half_comes", r"deadlock .* thread 0 waits at a barrier of its cluster, line \d+"),
        ("empty_block_leaves", "waits for its cluster, of which another ended: line"),
        ("another_cluster", "no such block in the cluster: line"),
    ],
)
def test_faults_of_clusters_are_reported(fault: str, message: str) -> None:
    """Whichever block comes first."""
    for seed in (0, 1, 2):
        runtime = EmulatorRuntime(seed=seed, edit=planted(FAULTS[fault]))
        with pytest.raises(EmulatorError, match=message):
            WORK["clusters"](runtime, "cluster")


@pytest.mark.deep
@pytest.mark.parametrize(
    "fault",
    [n for n, f in FAULTS.items() if f.kernel != "pull" and f.sanitizer != "address" and n not in SILENT],
)
def test_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By other records, or by what the emulator says. However few splits are, they merge on two levels."""
    monkeypatch.setattr(attention, "choose_splits", lambda load, number: Splits(number, 2))
    kernel, kind = FAULTS[fault].kernel, FAULTS[fault].kind

    def bits(seed: int, edit: Callable[[str], str] = str) -> np.ndarray:
        return WORK[kind](EmulatorRuntime(seed=seed, edit=edit), kernel).view(np.uint32)

    def is_seen(seed: int) -> bool:
        try:
            return bool((bits(seed, planted(FAULTS[fault])) != good).any())
        except EmulatorError as error:
            return "g++" not in str(error)

    good = bits(0)
    assert any(map(is_seen, range(8)))
