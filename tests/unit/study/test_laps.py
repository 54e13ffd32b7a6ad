"""In which order the stopwatch of benchmarks/gpu_laps.py speaks to CuPy, on a GPU that is made up."""

from types import SimpleNamespace

import gpu_laps
import pytest

from tests.unit.backends.cupy_signatures import MadeUpCupy
from treeattn.backends.cuda import cupy_runtime


def test_laps_lie_between_events_and_host_time_leaves_the_device_out(monkeypatch):
    cupy = MadeUpCupy()
    monkeypatch.setattr(cupy_runtime, "current", lambda: SimpleNamespace(namespace=cupy))
    stopwatch, log = gpu_laps.CupyStopwatch(), cupy.log
    assert stopwatch.l2_bytes == 1 << 18
    log.clear()
    cupy.answers["cuda.get_elapsed_time"] = 2.0  # ms
    times = stopwatch.laps([lambda: log.append("a"), lambda: log.extend("bc")])
    assert times == pytest.approx([2e-3, 2e-3])
    ordered = [entry if isinstance(entry, str) else entry[0] for entry in log if entry[0] != "cuda.Event"]
    record, wait = "cuda.Event.record", "cuda.Stream.synchronize"
    assert ordered[: ordered.index("out of cuda.Stream")] == [
        *("in cuda.Stream", wait, record, "a", record, "b", "c", record, "cuda.Event.synchronize"),
    ]
    first, second = (entry[1:] for entry in log if entry[0] == "cuda.get_elapsed_time")
    assert first[1] is second[0]

    log.clear()
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(gpu_laps.time, "perf_counter", lambda: next(clock))
    assert stopwatch.host_seconds(lambda: log.append("call"), 4) == 1.0
    assert log[1:-1] == ["call", (wait,), *["call"] * 4, (wait,)]
