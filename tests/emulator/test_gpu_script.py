"""`make gpu` on the emulator: every kind of shape over a few tokens; families that fail or hang."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu
import gpu_laps
import numpy as np
import pytest

from .runtime import EmulatorRuntime

SHAPES = [
    gpu.Shape(2, 2, 40),
    gpu.Shape(8, 2, 40),
    gpu.Shape(16, 1, 40, head_dim=576, latent=True),
    gpu.Shape(8, 2, 40, dtype="float8_e4m3fn"),
    gpu.Shape(4, 1, 40, nodes=7),
    gpu.Shape(8, 2, 64, page=gpu.PAGE),
    gpu.Shape(8, 2, 40, batch=3),
    gpu.Shape(8, 1, 300),
]


class Stopwatch(EmulatorRuntime):
    """With a device of a small L2 cache, whose time counts launches and copies."""

    driver, l2_bytes, made, multiprocessors = None, 20_000, 0, 16
    runtime = property(lambda self: self)

    def queue(self, work: Callable[[], object]) -> None:
        super().queue(work)
        self.made += not self.capturing()

    def laps(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """In microseconds: one each."""
        times = [(run(), self.made * 1e-6)[1] for run in (tuple, *runs)]
        return [float(lap) for lap in np.diff(times)]

    def host_seconds(self, run: Callable[[], object], calls: int) -> float:
        run()
        return 3e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kind_of_shape_is_timed(shape: gpu.Shape) -> None:
    (row,) = gpu.time_shapes(Stopwatch(), [shape], 1)
    launches = round(row["microseconds"])  # attention, its merge if any
    assert row["microseconds"] == pytest.approx(launches)
    assert launches in (1, 2)
    assert row["percent_of_copy_rate"] > 0
    assert (row["without_clusters_microseconds"] is None) == (shape.tokens < 256)
    assert row["torch"] is not None or row["torch_microseconds"] > 0


def test_a_lap_computes_attention_over_caches_of_their_own() -> None:
    """What is timed gives the records of the same call outside; between two uses of the same keys more than
    twice the L2 cache is read."""
    stopwatch = Stopwatch()
    step = gpu.Step(stopwatch, SHAPES[0])
    assert (len(step.caches) - 1) * step.bytes >= 2 * stopwatch.l2_bytes
    assert not any(np.shares_memory(a[0], b[0]) for a, b in itertools.combinations(step.caches, 2))
    step(*step.caches[0])
    first = step.out.copy()
    lap = gpu_laps.captured(stopwatch.runtime, [lambda: step(*step.caches[0])])
    step.out[:] = 77
    lap()
    assert (step.out == first).all()
    assert first.any()


@pytest.mark.parametrize(
    ("program", "limit", "code", "result"),
    [
        ("print('{\"a\": 1}')", 120, 0, [{"a": 1}]),
        ("raise SystemExit('no')", 120, 1, ["no"]),
        ("import os, time; print('{\"a\": 1}', flush=True); os.fork(); time.sleep(600)", 2, None, [{"a": 1}]),
    ],
)
def test_a_family_that_fails_or_hangs_is_recorded_with_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, limit: int, code: int | None, result: Any
) -> None:
    (tmp_path / "family.py").write_text(program)
    monkeypatch.setitem(gpu.COMMANDS, "doctor", (limit, f"{{python}} {tmp_path}/family.py"))
    found = gpu.run("doctor", tmp_path)
    assert found["exit_code"] == code
    assert found["result"] == result
    assert ("ended after 2 s" in found["printed"]) == (code is None)
    assert [path.name for path in tmp_path.iterdir()] == ["family.py"]


def test_the_whole_script_writes_a_file_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "family.py").write_text("print('{\"a\": 1}')")
    monkeypatch.setitem(gpu.COMMANDS, "doctor", (120, f"{{python}} {tmp_path}/family.py"))
    monkeypatch.setattr(gpu.cupy_runtime, "problem", lambda: None)
    monkeypatch.setattr(gpu.cuda_driver, "inventory", lambda: ("580.1, CUDA up to 13.0", ["a GPU"]))
    monkeypatch.setattr("sys.argv", ["gpu.py", "doctor", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 0
    found = json.loads((tmp_path / "gpu_doctor.json").read_text())
    assert (found["driver"][1], found["result"]) == (["a GPU"], [{"a": 1}])
