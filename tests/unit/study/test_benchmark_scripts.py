"""Scripts of benchmarks/ on machines that are made up."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_laps
import pytest
from msgspec import structs

from tests.unit.backends.cupy_signatures import MadeUpCupy
from treeattn.backends.cuda import cupy_runtime
from treeattn.collectives import build
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.placement import block
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.schedule import Payload

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks/published.py"
PROGRAMS = {
    "recursive_doubling_ompi": "recursive_doubling",
    "rabenseifner_ompi": "reduce_scatter_gather:order=near",
    "ring_ompi": "ring",
}


@pytest.fixture
def published(tmp_path):
    """A file of what is simulated of three runs of Leonardo, one slower than the other."""
    cluster = description.load("leonardo")
    rows = []
    for day, (ranks, slower) in enumerate(((8, 1.0), (32, 1.5), (16, 2.0)), 1):
        tiers = [structs.replace(tier, latency=slower * tier.latency) for tier in cluster.tiers]
        then = structs.replace(cluster, tiers=tuple(tiers))
        for program, scheme in PROGRAMS.items():
            for size in (256, 2048, 16384, 131072, 1 << 20):
                found = simulate(build(scheme, ranks), then, block(then, ranks), Payload(size // 4, 4))
                rows.append({
                    "system": "made", "run": f"2030_01_0{day}", "ppn": 1, "ranks": ranks, "library": "OMPI 4",
                    "collective": "allreduce", "algorithm": program, "bytes": size, "median_us": found.time,
                })  # fmt: skip
    with (tmp_path / "made.csv").open("w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return tmp_path / "made.csv"


@pytest.mark.slow
def test_a_machine_that_is_as_simulated_is_predicted(published, tmp_path):
    pytest.importorskip("scipy")
    out = tmp_path / "found.json"
    words = ["--known", published, "--held", published, "--json", out]
    subprocess.run([sys.executable, SCRIPT, *map(str, words)], check=True, timeout=300)
    found = json.loads(out.read_text())
    assert len(found["rows"]) == 3 * (3 * 5 - 3)
    assert found["median_error"] < 0.1
    assert found["p90_error"] < found["two_parameters"]["p90_error"]


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
