"""The roofline's numbers are real: they follow the work, and nothing is measured without kernels."""

import numpy as np
import pytest

from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.errors import ArgumentError, BackendError
from treeattn.study import roofline
from treeattn.study.roofline import readers


@pytest.fixture(autouse=True)
def _kernels_needed() -> None:
    problem = cpu.compiled_kernels_problem()
    if problem:
        pytest.skip(problem)


def test_rows_and_rates() -> None:
    lines: list[str] = []
    result = roofline.measure(2048, ["bfloat16", "float32"], [1, 3], [1, 2], repeats=2, progress=lines.append)
    cases = [(row["dtype"], row["group"], row["threads"]) for row in result["rows"]]
    assert cases == [(d, g, t) for d in ("bfloat16", "float32") for g in (1, 3) for t in (1, 2)]
    assert len(lines) == 8
    assert 0.1 < result["read_rate_gb_s"] < 10_000
    assert 0.1 < result["multiply_add_rate_g_s"] < 10_000
    for row in result["rows"]:
        size = {"bfloat16": 2, "float32": 4}[row["dtype"]] * 2 * 2048 * 8 * 128
        assert row["tokens"] == 2048
        assert row["gb_s"] == pytest.approx(size / row["microseconds"] / 1e3)
        assert row["percent_of_read_rate"] > 0
        assert row["percent_of_bound"] > 0
        assert row["gb_s"] <= result["read_rate_gb_s"] * row["percent_of_read_rate"] / 100 * 1.001


def test_unusable_arguments() -> None:
    for bad in ({"tokens": 0}, {"groups": [0]}, {"threads": [0]}, {"repeats": 0}):
        with pytest.raises(ArgumentError, match="positive"):
            roofline.measure(**{"tokens": 16, **bad})  # type: ignore[arg-type]


def test_nothing_is_measured_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "loaded", lambda: (None, "no C compiler: cc"))
    with pytest.raises(BackendError, match="no C compiler: cc"):
        roofline.measure(16)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_reader_reads_all(threads: int) -> None:
    """Each changed byte changes the xor, but for the documented ends; and each byte counts once."""
    size = 3 * (1 << 21) + 5000
    memory = np.zeros(size + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][:size]
    draw = np.random.default_rng(0)
    for reader in readers():
        assert reader.read(memory, threads) == 0
        for place in (0, size - 64, *draw.integers(0, size - 64, 4)):
            memory[place] = 1
            assert bin(reader.read(memory, threads)).count("1") == 1, reader
            memory[place] = 0


def test_a_narrower_instruction_set_stands_for_a_processor_without_the_wider(monkeypatch) -> None:
    monkeypatch.setenv("TREEATTN_ISA", "portable")
    assert {reader.isa for reader in readers()} == {"portable"}
