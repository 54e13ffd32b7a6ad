"""``treeattn export``: what other tools read out of what it writes."""

from __future__ import annotations

import csv
import io
import json
import sys
from statistics import median

import pytest

from tests.unit.study import made_results
from treeattn.study.compare import results
from treeattn.study.compare.schema import NULL, SUM

from .launch import in_process


@pytest.fixture
def measured(tmp_path):
    keys = [
        key
        for heads in (4, 16, 64)
        for key in made_results.keys(("ring", SUM, NULL), tokens=[0], what="reduce", heads=heads, kv_heads=4)
    ]
    return made_results.write(tmp_path / "r.jsonl", keys)


def test_csv_is_flat_and_whole(measured):
    done = in_process("export", measured)
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    points = results.read(measured).points
    assert len(rows) == sum(len(point.samples) for point in points)
    assert len({tuple(row) for row in rows}) == 1
    assert None not in rows[0]
    point = points[7]
    mine = next(
        row for row in rows
        if (row["scheme"], row["heads"], row["repetition"], row["series"])
        == (point.key.scheme, str(point.key.heads), str(point.repetition), "completion")
    )  # fmt: skip
    assert float(mine["median_us"]) == median(point.samples["completion"])
    assert int(mine["record_bytes"]) == point.key.heads * 130 * 4


def test_parquet_is_the_same_to_pandas(measured, tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed (the extra `test`)")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra `parquet`)")
    for form in ("csv", "parquet"):
        done = in_process("export", measured, "--format", form, "--out", tmp_path / form)
    ours, flat = pandas.read_parquet(tmp_path / "parquet"), pandas.read_csv(tmp_path / "csv")
    assert list(ours.columns) == list(flat.columns)
    assert ours["median_us"].tolist() == flat["median_us"].tolist()
    assert str(ours["heads"].dtype) == "int64"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = in_process("export", measured, "--format", "parquet", "--out", tmp_path / "p", code=1)
    assert done.stderr.count("pip install 'treeattn[parquet]'") == 1


def test_osu_and_nccl_tables_hold_the_medians(measured):
    found = {
        s.key.heads: s.times["completion"].median
        for s in results.summarise(results.read(measured))
        if s.key.scheme == "ring"
    }
    osu = in_process("export", measured, "--format", "osu", "--scheme", "ring").stdout.splitlines()
    assert osu[2].split() == ["#", "Size", "Avg", "Latency(us)"]
    sizes = [line.split() for line in osu if line and line[0] != "#"]
    assert {int(size) // 520: float(time) for size, time in sizes} == pytest.approx(found, abs=0.006)
    table = in_process("export", measured, "--format", "nccl-tests").stdout
    rows = [line.split() for line in table.splitlines() if line and line[0] != "#"]
    assert [row[3] for row in rows] == ["sum"] * 3 + ["merge"] * 3
    assert {len(row) for row in rows} == {13}
    for row in rows[3:]:
        size, time = int(row[0]), float(row[5])
        assert time == pytest.approx(found[size // 520], abs=0.006)
        assert float(row[6]) == pytest.approx(size / time / 1e3, abs=0.001)
        assert float(row[7]) == pytest.approx(size / time / 1e3 * 1.5, abs=0.001)
        assert row[8] == "0"


def test_json_of_nccl_tests_is_of_one_scheme(measured, tmp_path):
    out = tmp_path / "n.json"
    words = ("export", measured, "--format", "nccl-tests-json")
    assert "choose by --scheme" in in_process(*words, code=2).stderr
    in_process(*words, "--scheme", "ring", "--out", out)
    made = json.loads(out.read_text())
    assert [device["rank"] for device in made["config"]["devices"]] == [0, 1, 2, 3]
    for row in made["results"]:
        assert row["in_place"]["nwrong"] == 0
        assert row["size"] == row["count"] * 4
        assert row["out_of_place"]["bus_bw"] == pytest.approx(1.5 * row["in_place"]["alg_bw"])


def test_few_iterations_are_told_wherever_medians_go(measured, tmp_path, monkeypatch):
    """In exports and on the page; compare shows the same tables."""
    page = tmp_path / "r.html"
    monkeypatch.setattr("treeattn.study.figures.draw.problem", lambda: "no figures here")
    for enough in (False, True):
        if enough:
            lines = [json.loads(line) for line in measured.read_text().splitlines()]
            for line in lines[1:]:
                line["samples"] = {name: times * 7 for name, times in line["samples"].items()}
            measured.write_text("".join(json.dumps(line) + "\n" for line in lines))
        told = [
            in_process("export", measured, "--scheme", "ring", "--format", form).stdout
            for form in ("osu", "nccl-tests", "nccl-tests-json")
        ]
        in_process("report", measured, "--out", page)
        for text in (*told, page.read_text()):
            assert ("as few as 3 iterations a block: a median wants 20" in text) is not enough
        rows = csv.DictReader(io.StringIO(in_process("export", measured).stdout))
        assert {row["iterations"] for row in rows} == {"21" if enough else "3"}
