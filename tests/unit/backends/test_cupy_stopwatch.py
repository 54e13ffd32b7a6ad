"""In which order the stopwatch speaks to CuPy, on a GPU that is made up."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from cupy_signatures import MadeUpCupy

from treeattn.backends.cuda import cupy_runtime, cupy_stopwatch
from treeattn.backends.cuda import driver as cuda_driver
from treeattn.backends.cuda.cupy_stopwatch import CupyStopwatch


@pytest.fixture
def cupy(monkeypatch):
    made = MadeUpCupy()
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(cupy_runtime, "current", lambda: SimpleNamespace(multiprocessors=132))
    monkeypatch.setattr(cuda_driver, "driver", lambda: cuda_driver.Driver("550.54.15", (12, 4), ()))
    return made


@pytest.fixture
def log(cupy):
    """What is called after the stopwatch is there."""
    return cupy.log


@pytest.fixture
def stopwatch(cupy, log):
    made = CupyStopwatch()
    log.clear()
    return made


def test_laps_lie_between_events_without_waiting(cupy, stopwatch, log):
    cupy.answers["cuda.get_elapsed_time"] = 2.0  # ms
    laps = stopwatch.laps([lambda: log.append("a"), lambda: log.extend("bc")])
    assert laps == pytest.approx([2e-3, 2e-3])
    ordered = [entry if isinstance(entry, str) else entry[0] for entry in log if entry[0] != "cuda.Event"]
    record, wait = "cuda.Event.record", "cuda.Stream.synchronize"
    assert ordered[: ordered.index("out of cuda.Stream")] == [
        *("in cuda.Stream", wait, record, "a", record, "b", "c", record, "cuda.Event.synchronize"),
    ]
    first, second = (entry[1:] for entry in log if entry[0] == "cuda.get_elapsed_time")
    assert first[1] is second[0]


def test_host_time_leaves_the_device_out(stopwatch, log, monkeypatch):
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(cupy_stopwatch.time, "perf_counter", lambda: next(clock))
    assert stopwatch.host_seconds(lambda: log.append("call"), 4) == 1.0
    wait = ("cuda.Stream.synchronize",)
    assert log[1:-1] == ["call", wait, *["call"] * 4, wait]


def test_facts(stopwatch, monkeypatch):
    def smi(command, **options):
        assert command[:3] == ["nvidia-smi", "-i", "0000:3B:00.0"]
        return SimpleNamespace(stdout="1980, 2619, 1980, 2619, [N/A], 700.00, 31\n")

    monkeypatch.setattr(subprocess, "run", smi)
    facts = stopwatch.facts()
    assert (facts["name"], facts["driver"], facts["nvrtc"]) == ("Made up", "550.54.15", "12.9")
    assert facts["l2_bytes"] == 1 << 18
    assert facts["readings"]["sm_clock_mhz"] == 1980
    assert facts["readings"]["power_w"] == "[N/A]"
    assert facts["readings"]["temperature_c"] == 31


def test_no_nvidia_smi_is_no_obstacle(stopwatch, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert stopwatch.facts()["readings"] is None
