"""The GPU benchmark from end to end on the emulator, and what it says where it cannot run."""

from __future__ import annotations

import itertools
import sys
from functools import partial
from typing import Any

import gpu_kernel
import numpy as np
import pytest

from tests.command.launch import ROOT, run
from treeattn.backends.cuda import cupy_stopwatch

from .raw_module import compiler_problem
from .stopwatch import EmulatorStopwatch

Array = np.ndarray[Any, Any]
SCRIPT = ROOT / "benchmarks" / "gpu_kernel.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    if compiler_problem():
        pytest.skip(str(compiler_problem()))
    # The emulator takes its time over 256 splits.
    for name, few in (("CALLS", 1), ("TOKENS_OF_A_SPLIT", 40), ("COMBINES", ((16, 16, 2), (16, 1, 3)))):
        monkeypatch.setattr(gpu_kernel, name, few)
    return gpu_kernel


def widened(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def plain_attention(error: float, stopwatch: Any, q: Array, caches: list[tuple[Array, Array]]) -> Any:
    """Another's attention: NumPy's, off by `error`; a lap of it is a copy."""
    k, v = (widened(array)[0].repeat(q.shape[2] // array.shape[2], axis=1) for array in caches[0])
    scores = np.einsum("hd,thd->ht", widened(q)[0, 0], k) * k.shape[2] ** -0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    answer = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), v) + error
    scratch = np.zeros(10_000_000, np.uint8)
    return partial(stopwatch.runtime.copy, scratch, scratch), answer


def refuses(*_: object) -> Any:
    raise RuntimeError("no kernel image\nand more")


def test_every_number_is_there(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stopwatch = EmulatorStopwatch(l2_bytes=20_000)
    others = {"torch": partial(plain_attention, 0.0), "flashinfer": refuses}
    results = benchmark.run(stopwatch, others, 2, tokens=(40,))
    assert [(row["heads"], row["kv_heads"]) for row in results["rows"]] == [(16, 16), (32, 8)]
    for row in results["rows"]:
        size = 2 * 40 * row["kv_heads"] * 128 * 2
        assert row["floor_microseconds"] == pytest.approx(size / 2e12 * 1e6)
        assert row["microseconds"]["attention"] == pytest.approx(5)
        assert row["microseconds"]["attention and finish"] == pytest.approx(10)
        assert row["microseconds"]["torch"] == pytest.approx(10 / row["caches"])
        assert row["percent_of_copy_rate"]["attention"] == pytest.approx(100 * size / 2e12 / 5e-6)
        assert row["problems"] == {"flashinfer": "RuntimeError: no kernel image"}
        assert row["goals"] == {
            "6 us over the floor": True,
            "a step under 9 us": False,
            "ahead of torch": False,
            "new views under 15 us of the host": True,
        }
    assert list(results["small_steps_microseconds"].values()) == pytest.approx([5] * 3)
    assert [(row["heads"], row["kv_heads"], row["splits"]) for row in results["combines"]] == [
        (16, 16, 2),
        (16, 1, 3),
    ]
    for row in results["combines"]:  # one launch is as long as another to this clock
        assert row["microseconds"] == pytest.approx(
            {"one_sequence": 5, "as_many_sequences": 5, "combine": 0}, abs=1e-9
        )
        assert row["goals"] == {"1.5 us": True}
    assert results["captured_step"]["one launch gives the result"] is True
    assert results["captured_step"]["microseconds"] == pytest.approx(10)
    assert "flashinfer: RuntimeError: no kernel image" in capsys.readouterr().out


def test_one_that_computes_something_else_is_not_timed_and_no_row_is_lost(benchmark: Any) -> None:
    kept: list[int] = []
    wrong = {"torch": partial(plain_attention, 0.1)}
    stopwatch = EmulatorStopwatch(20_000)
    results = benchmark.run(stopwatch, wrong, 1, (40,), lambda found: kept.append(len(found["rows"])))
    assert kept == [1, 2]
    for row in results["rows"]:
        assert row["problems"]["torch"].startswith("computes something else: it differs by ")
        assert "torch" not in row["microseconds"]


@pytest.mark.parametrize(
    ("heads", "tokens", "microseconds", "met"),
    [
        ((16, 16), 4096, 16.1, {"6 us over the floor": False, "ahead of torch": True}),
        (
            (32, 8),
            1024,
            8.9,
            {"6 us over the floor": True, "a step under 9 us": True, "ahead of torch": True},
        ),
        ((32, 8), 16384, 99.0, {"ahead of torch": False}),
        ((32, 8), 8192, 15.4, {"65 percent of the copy rate": False, "ahead of torch": True}),
        ((32, 8), 8192, 15.3, {"65 percent of the copy rate": True, "ahead of torch": True}),
        ((16, 16), 65536, 11.3, {"90 percent of the copy rate": False, "ahead of torch": True}),
        ((32, 8), 65536, 11.3, {"88 percent of the copy rate": True, "ahead of torch": True}),
        ((32, 8), 262144, 40.0, {"94 percent of the copy rate": False, "ahead of torch": False}),
        ((16, 16), 262144, 10.5, {"95 percent of the copy rate": True, "ahead of torch": True}),
    ],
)
def test_goals(
    benchmark: Any, heads: tuple[int, int], tokens: int, microseconds: float, met: dict[str, bool]
) -> None:
    """Beside a floor of 10 microseconds, torch with 30, and a host with 20 over new views."""
    row = {
        "heads": heads[0],
        "kv_heads": heads[1],
        "tokens": tokens,
        "floor_microseconds": 10,
        "microseconds": {"attention": microseconds, "attention and finish": microseconds, "torch": 30},
        "percent_of_copy_rate": {"attention": 100 * 10 / microseconds},
        "host_microseconds_over_views": 20,
    }
    assert benchmark.goals(row) == met | {"new views under 15 us of the host": False}


def test_every_goal_is_of_a_case_that_is_measured(benchmark: Any) -> None:
    for *heads, tokens in benchmark.PERCENT:
        assert tuple(heads) in benchmark.SHAPES
        assert tokens in benchmark.TOKENS


def test_views_are_never_those_of_the_call_before(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, seen = benchmark.Step(EmulatorStopwatch(20_000), 2), []
    monkeypatch.setattr(step, "_planned", lambda q, k, v: seen.append((k.shape[1], v.shape[1])))
    k, v = np.zeros((2, 1, 40, 1, 128), np.uint16)
    for _ in range(50):
        step.attention_over_views(k, v)
    assert all(k == v for k, v in seen)
    assert all(one != other for one, other in itertools.pairwise(seen))
    assert {tokens for tokens, _ in seen} == set(range(21, 41))


class Nothing:
    """A stopwatch of no device."""

    def facts(self) -> dict[str, Any]:
        return {}


def test_both_sides_of_a_combine_are_the_same_blocks(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []
    stopwatch = EmulatorStopwatch(20_000)
    kernel = type(stopwatch.runtime).kernel

    def launched(self: Any, *given: Any) -> Any:
        run = kernel(self, *given)
        return lambda grid, *rest, **more: (grids.append(grid), run(grid, *rest, **more))

    monkeypatch.setattr(type(stopwatch.runtime), "kernel", launched)
    benchmark.combines(stopwatch, lambda: None, 1)
    together, apart = grids[0], grids[2]  # each runs once, and once more to be recorded
    assert (together, apart) == ((2, 16, 1), (1, 16, 2))


def test_a_place_that_cannot_be_written_is_found_before_measuring(tmp_path: Any) -> None:
    done = run(SCRIPT, "--alone", "--json", tmp_path / "none" / "x.json", code=1, PYTHONPATH=str(ROOT))
    assert done.stderr.startswith("gpu_kernel.py: ")
    assert "x.json" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nothing_is_measured_before_the_software_is_known(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads the MPI library, which may end the process: then no measurement is lost."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--alone"])
    monkeypatch.setattr(benchmark.cupy_runtime, "problem", lambda: None)
    monkeypatch.setattr(cupy_stopwatch, "CupyStopwatch", Nothing)
    order: list[str] = []
    monkeypatch.setattr(benchmark.harness.environment, "software", lambda: order.append("software"))
    monkeypatch.setattr(benchmark, "run", lambda *_, keep: order.append("measured") or {"rows": []})
    benchmark.main()
    assert order == ["software", "measured"]


@pytest.mark.parametrize("words", [[], ["--alone"]])
def test_what_is_missing_is_named(tmp_path: Any, words: list[str]) -> None:
    """Without CuPy and torch: two modules of these names that cannot be imported stand before them."""
    for name in ("cupy", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('none here', name='{name}')\n")
    done = run(SCRIPT, *words, code=1, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stdout == ""
    cupy, *torch = done.stderr.splitlines()
    assert cupy.startswith("gpu_kernel.py: no CuPy: install treeattn[cuda12]")
    said = ["gpu_kernel.py: no torch to compare with (none here): pip install torch, or give --alone"]
    assert torch == ([] if words else said)
