"""The benchmark of splits: what it fits is what was there, and its sweep on the emulator."""

from __future__ import annotations

import json
import sys
from typing import Any

import gpu_splits as benchmark
import numpy as np
import pytest

from tests.command.launch import ROOT, run
from treeattn.backends.cuda import splits
from treeattn.backends.cuda.splits import Constants, Load, Splits

from .raw_module import compiler_problem
from .stopwatch import EmulatorStopwatch

SCRIPT = ROOT / "benchmarks" / "gpu_splits.py"
TRUE = Constants(
    launch=4.2,
    wave=0.9,
    megabyte=0.51,
    l2_megabyte=0.37,
    latency=0.62,
    level=1.7,
    merged_megabyte=14.0,
    next_launch=splits.shipped().next_launch,  # no row tells of it
)


def synthetic(constants: Constants, noise: float = 0.0) -> list[dict[str, Any]]:
    """Rows as a device of these constants would give them."""
    rng, rows = np.random.default_rng(5), []
    for kv_heads in (1, 40):
        for tokens in benchmark.TOKENS:
            for count in benchmark.ROWS:
                tiles, rows_of_tile = -(-count // 64), min(count, 64)
                load = Load(
                    *(kv_heads * tiles, rows_of_tile, tokens, 128, 512, 64, 128, 264, 132), sharing=tiles
                )
                for number in benchmark.SPLITS[::2]:
                    fan = splits.choose_splits(load, number).fan
                    time = float(splits.predict(load, number, fan, constants) * np.exp(noise * rng.normal()))
                    case = {
                        "kv_heads": kv_heads,
                        "rows": count,
                        "tokens": tokens,
                        "splits": number,
                        "fan": fan,
                    }
                    rows.append(case | {"microseconds": time, "load": load._asdict()})
    return rows


def test_the_constants_of_a_known_device_are_found() -> None:
    rows = synthetic(TRUE)
    assert benchmark.fit(rows, splits.shipped()) == pytest.approx(TRUE, rel=1e-4)
    facts = benchmark.judge(rows, TRUE)
    assert facts["largest_error_percent"] == pytest.approx(0)
    assert facts["largest_choice_slower_percent"] == 0


def test_noise_moves_them_little() -> None:
    rows = synthetic(TRUE, noise=0.03)
    fitted = benchmark.fit(rows, splits.shipped())
    assert fitted.megabyte == pytest.approx(TRUE.megabyte, rel=0.05)
    assert fitted.latency == pytest.approx(TRUE.latency, rel=0.05)
    assert fitted.launch + fitted.wave == pytest.approx(TRUE.launch + TRUE.wave, rel=0.05)
    assert benchmark.judge(rows, fitted)["median_error_percent"] < 4
    assert benchmark.judge(rows, splits.shipped())["median_error_percent"] > 10


def test_what_no_row_tells_of_stays() -> None:
    rows = [row for row in synthetic(TRUE) if row["splits"] == 1]
    fitted, start = benchmark.fit(rows, splits.shipped()), splits.shipped()
    assert fitted.level == pytest.approx(start.level)
    assert fitted.merged_megabyte == pytest.approx(start.merged_megabyte)


@pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
def test_a_sweep_from_end_to_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(benchmark, "ROWS", (1, 128))
    kept: list[int] = []
    rows = benchmark.measure(
        EmulatorStopwatch(20_000), 1, (100,), (1, 3), keep=lambda found: kept.append(len(found))
    )
    assert kept == [2, 4, 6, 8]  # after each sweep what there is, so that a run that is ended has rows
    assert [(r["kv_heads"], r["rows"], r["tokens"], r["splits"]) for r in rows] == [
        (kv_heads, count, 100, number) for kv_heads in (1, 8) for count in (1, 128) for number in (1, 3)
    ]
    assert {round(row["microseconds"], 6) for row in rows} == {5}  # to a clock that counts launches
    loads = [Load(**row["load"]) for row in rows]
    assert [(load.tiles, load.sharing) for load in loads[::2]] == [(1, 1), (2, 2), (8, 1), (16, 2)]
    assert "128 rows, 8 KV heads, 100 tokens: fastest in 1 splits, 5.0 us" in capsys.readouterr().out


@pytest.mark.parametrize("by_gpu_day", [False, True])
def test_an_earlier_run_is_fitted_and_its_constants_are_those_that_are_read(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, by_gpu_day: bool
) -> None:
    earlier, constants = tmp_path / "rows.json", tmp_path / splits.CONSTANTS_FILE
    facts = {"rows": synthetic(TRUE), "device": {"name": "G"}, "date": "2031-02-03"}
    whole = {"step": "splits", "date": "2031-02-04T00:00:00+00:00", "result": facts}
    earlier.write_text(json.dumps(whole if by_gpu_day else facts))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--fit", str(earlier), "--constants", str(constants)])
    benchmark.main()
    facts = json.loads(constants.read_text())
    assert (facts["device"], facts["date"]) == ("G", "2031-02-03")
    monkeypatch.setattr(splits.resources, "files", lambda _: tmp_path)
    assert splits.shipped.__wrapped__() == pytest.approx(TRUE, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--json", "none/x.json"], "none/x.json"),
        (["--constants", "none/x.json"], "none/x.json"),
        (["--fit", "absent.json"], "absent.json"),
        (["--fit", "empty.json"], "empty.json holds no rows: --fit takes what --json wrote"),
        ([], "no CuPy: install treeattn[cuda12]"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Any, words: list[str], said: str) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('none here', name='cupy')\n")
    (tmp_path / "empty.json").write_text('{"rows": [], "device": {"name": "G"}, "date": "2031-02-03"}')
    given = [tmp_path / word if word.endswith(".json") else word for word in words]
    done = run(SCRIPT, *given, code=1, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stdout == ""
    assert done.stderr.startswith("gpu_splits.py: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_splits_count_their_groups() -> None:
    assert (Splits(7, 3).groups, Splits(7, 7).groups, Splits(1, 1).groups) == (3, 1, 1)
