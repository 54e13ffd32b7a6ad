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

#: What pairs of blocks do wrong -> what is said.
CLUSTERS = {
    "BEGINS_LATE": r"reads the shared memory of one that need not have begun: line \d+, block",
    "ENDS_EARLY": "has ended: line|ends while others of its cluster may read its shared memory",
    "LEAVES": "waits for its cluster, of which another ended: line",
    "HALF_COMES": r"deadlock .* thread 0 waits at a barrier of its cluster, line \d+",
    "NO_SUCH_BLOCK": "no such block in the cluster: line",
    "NOT_SHARED": "is not in shared memory: line",
}


@pytest.fixture(scope="module")
def faults() -> RawModule:
    EmulatorRuntime().kernel("finish", "finish")  # another module is there before: they must not mix
    code = source("partial_attention") + faults_source()
    names = (
        *("divergent_barrier", "mask_names_absent_lanes", "caller_not_in_mask", "different_operations"),
        *("uninitialised_shared", "shared_race", "meets_without_a_cluster"),
        *(f"exchange<{how}>" for how in ("RIGHT", *CLUSTERS)),
    )
    return RawModule(code, name_expressions=names)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("divergent_barrier", r"deadlock in block \(0, 0, 0\): thread 0 waits at a block barrier, line \d+"),
        ("mask_names_absent_lanes", r"deadlock .* waits at a warp operation"),
        ("caller_not_in_mask", r"not in the warp mask: line \d+, block \(0, 0, 0\), thread 8"),
        ("different_operations", "different warp operations"),
        ("meets_without_a_cluster", "a kernel without clusters waits for one"),
    ],
)
def test_faults_of_control_flow_are_reported(faults: RawModule, name: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        faults.get_function(name)((1,), (64,), (np.zeros(64, np.float32),))


@pytest.mark.parametrize("how", CLUSTERS)
def test_faults_of_clusters_are_reported(faults: RawModule, how: str) -> None:
    """Whichever block comes first."""
    for seed in range(4):
        with pytest.raises(EmulatorError, match=CLUSTERS[how]):
            faults.get_function(f"exchange<{how}>")((2,), (64,), (np.zeros(64, np.float32),), seed=seed)


def test_blocks_of_a_cluster_run_at_once(faults: RawModule) -> None:
    """In any order; a row that is not whole clusters is refused, as by the driver."""
    exchange = faults.get_function("exchange<RIGHT>")
    for seed in range(4):
        x = np.zeros(8, np.float32)
        exchange((4, 2), (64,), (x,), seed=seed)
        assert x.tolist() == [2, 1, 4, 3, 0, 0, 0, 0]
    with pytest.raises(EmulatorError, match="a row of 3 blocks is not whole clusters of 2"):
        exchange((3,), (64,), (x,))


@pytest.mark.parametrize("name", ["uninitialised_shared", "shared_race"])
def test_shared_memory_starts_as_nan(faults: RawModule, name: str) -> None:
    x = np.zeros(64, np.float32)
    faults.get_function(name)((1,), (64,), (x,))
    assert np.isnan(x).any()


# These change no value here, or end the process: see test_sanitizers.py.
SILENT = ("no_fence", "no_arrival_barrier", "relaxed_cluster")


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
