"""In which order the stopwatch speaks to CuPy, on a pretended GPU."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from cupy_signatures import ATTRIBUTES, strict

from treeattn.backends.cuda import cupy_runtime, cupy_stopwatch
from treeattn.backends.cuda import driver as cuda_driver
from treeattn.backends.cuda.cupy_stopwatch import CupyStopwatch


def pretend(monkeypatch, log):
    """A CuPy that logs what happens to the stream; an event's time is its place in the log, in ms."""

    class Stream:
        def __enter__(self):
            return self

        def __exit__(self, *_): ...

        def synchronize(self):
            log.append("wait")

    class Event:
        at = -1

        def record(self, stream):
            log.append("event")
            self.at = len(log)

        def synchronize(self):
            log.append("wait for event")

    properties = {"name": b"Pretended", "major": 9, "minor": 0, "totalGlobalMem": 80 << 30}
    device = SimpleNamespace(id=0, pci_bus_id="0000:3B:00.0", attributes={"L2CacheSize": 50 << 20})
    assert device.attributes.keys() <= set(ATTRIBUTES)
    cupy = ModuleType("cupy")
    vars(cupy).update(
        __version__="14.2.0",
        cuda=SimpleNamespace(
            Device=lambda: device,
            Stream=Stream,
            Event=Event,
            get_elapsed_time=strict(
                "cuda.get_elapsed_time", lambda first, second: float(second.at - first.at)
            ),
            nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)),
            runtime=SimpleNamespace(
                getDeviceProperties=strict("cuda.runtime.getDeviceProperties", lambda device: properties),
                driverGetVersion=lambda: 12040,
                runtimeGetVersion=lambda: 12090,
            ),
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy_runtime, "current", lambda: SimpleNamespace(multiprocessors=132))
    monkeypatch.setattr(cuda_driver, "driver", lambda: cuda_driver.Driver("550.54.15", (12, 4), ()))


def test_laps_lie_between_events_without_waiting(monkeypatch):
    log = []
    pretend(monkeypatch, log)
    times = CupyStopwatch().laps([lambda: log.append("a"), lambda: log.extend("bc")])
    assert log == ["wait", "event", "a", "event", "b", "c", "event", "wait for event"]
    assert times == pytest.approx([2e-3, 3e-3])


def test_host_time_leaves_the_device_out(monkeypatch):
    log = []
    pretend(monkeypatch, log)
    stopwatch = CupyStopwatch()
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(cupy_stopwatch.time, "perf_counter", lambda: next(clock))
    assert stopwatch.host_seconds(lambda: log.append("call"), 4) == 1.0
    assert log == ["call", "wait", *["call"] * 4, "wait"]


def test_facts(monkeypatch):
    pretend(monkeypatch, [])

    def smi(command, **options):
        assert command[:3] == ["nvidia-smi", "-i", "0000:3B:00.0"]
        return SimpleNamespace(stdout="1980, 2619, 1980, 2619, [N/A], 700.00, 31\n")

    monkeypatch.setattr(subprocess, "run", smi)
    facts = CupyStopwatch().facts()
    assert (facts["name"], facts["driver"], facts["nvrtc"]) == ("Pretended", "550.54.15", "12.9")
    assert facts["l2_bytes"] == 50 << 20
    assert facts["readings"]["sm_clock_mhz"] == 1980
    assert facts["readings"]["power_w"] == "[N/A]"
    assert facts["readings"]["temperature_c"] == 31


def test_no_nvidia_smi_is_no_obstacle(monkeypatch):
    pretend(monkeypatch, [])
    monkeypatch.setenv("PATH", "/nowhere")
    assert CupyStopwatch().facts()["readings"] is None
