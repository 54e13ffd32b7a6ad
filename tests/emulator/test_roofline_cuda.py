"""The GPU roofline from end to end on the emulator, under a clock that makes every number known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from treeattn.backends import cuda
from treeattn.cli import roofline as command
from treeattn.errors import ArgumentError
from treeattn.study.roofline import cuda as roofline_cuda

from .raw_module import compiler_problem
from .stopwatch import EmulatorStopwatch

pytestmark = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))


def test_rows_follow_the_clock(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    stopwatch = EmulatorStopwatch(l2_bytes=100_000)
    result = roofline_cuda.measure(
        20, ["bfloat16", "float32"], [1, 4], 3, lines.append, kv_heads=2, stopwatch=stopwatch
    )
    rows = result["rows"]
    assert [(row["dtype"], row["group"]) for row in rows] == [
        ("bfloat16", 1), ("bfloat16", 4), ("float32", 1), ("float32", 4),
    ]  # fmt: skip
    assert len(lines) == 4
    for row in rows:
        size = 2 * 20 * 2 * 128 * {"bfloat16": 2, "float32": 4}[row["dtype"]]
        assert row["caches"] == 1 + -(-200_000 // size)
        assert row["microseconds"] == pytest.approx(5)
        assert row["host_microseconds"] == pytest.approx(3)
        assert row["gb_s"] == pytest.approx(size / 5e-6 / 1e9)
        assert row["copy_rate_gb_s"] == pytest.approx(2000)  # n bytes in n / 1e12 seconds moved 2n
        assert row["percent_of_copy_rate"] == pytest.approx(100 * size / 5e-6 / 2e12)
    assert result["copy_rate_gb_s"] == pytest.approx(2000)
    assert stopwatch.runtime.graph_launches == 4 * 3
    command._of_cuda(result).show()
    shown = capsys.readouterr().out
    assert "emulator, driver none" in shown
    assert "copy rate: 2000 GB/s" in shown


@pytest.mark.parametrize("tokens", [3, 20, 200])
def test_the_cache_is_cold(tokens: int) -> None:
    """Between two uses of the same keys more than twice the L2 cache is read."""
    stopwatch = EmulatorStopwatch(l2_bytes=50_000)
    roofline_cuda.measure(tokens, ["float16"], [1], 2, kv_heads=1, stopwatch=stopwatch)
    used = stopwatch.runtime.keys[:-1]  # the last launch is for the time of the host
    caches = len(set(used))
    assert len(used) == 3 * caches  # once before the capture, then two laps
    for at, keys in enumerate(used[caches:], caches):
        assert used[at - caches] == keys  # the same order each time
    assert (caches - 1) * 2 * tokens * 128 * 2 >= 2 * stopwatch.l2_bytes
    assert caches >= 2


def test_a_lap_computes_attention() -> None:
    """What is timed gives the records of the same call outside."""
    stopwatch = EmulatorStopwatch(l2_bytes=1000)
    (k, v), *others = roofline_cuda.cold_caches(stopwatch, 1500, 1, "bfloat16")
    assert others
    assert (k[0, :476] == k[0, 1024:]).all()
    assert (k != v).any()
    assert not any(np.shares_memory(a, b) for a, b in itertools.combinations([k, *others[0]], 2))
    q = roofline_cuda.upload_random(stopwatch.runtime, (1, 1, 1, 128), k.dtype)
    records = np.zeros((1, 1, 1, 130), np.float32)
    attention = cuda.PlannedAttention(records, scale=0.1, runtime=stopwatch.runtime)
    lap = roofline_cuda.captured(stopwatch.runtime, [lambda: attention(q, k, v)])
    first = records.copy()
    assert 0 < first[0, 0, 0, 1] < 1500  # the denominator of so many tokens
    records[:] = 77
    lap()
    assert (records == first).all()


def test_unusable_arguments() -> None:
    stopwatch = EmulatorStopwatch(l2_bytes=1000)
    with pytest.raises(ArgumentError, match=r"float8.*float32"):
        roofline_cuda.measure(16, ["float8"], stopwatch=stopwatch)
    for bad in ({"tokens": 0}, {"groups": [0]}, {"repeats": 0}, {"kv_heads": 0}):
        with pytest.raises(ArgumentError, match="positive"):
            roofline_cuda.measure(**{"tokens": 16, **bad}, stopwatch=stopwatch)  # type: ignore[arg-type]
    assert stopwatch.runtime.launches == 0
