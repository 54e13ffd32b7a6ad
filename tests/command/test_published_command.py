"""`treeattn published` as people use it."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest

from .launch import in_process

DATA = Path(__file__).resolve().parents[2] / "treeattn/study/published/data"


@pytest.fixture(scope="module")
def lumi(tmp_path_factory):
    """(known, held): plain and gzip files of LUMI alone, one run held."""
    text = gzip.decompress((DATA / "pico_collectives.csv.gz").read_bytes()).decode()
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row["system"] == "lumi"]
    folder = tmp_path_factory.mktemp("lumi")
    files = folder / "known.csv", folder / "held.csv.gz"
    for path, held in zip(files, (False, True), strict=True):
        out = io.StringIO()
        writer = csv.DictWriter(out, rows[0])
        writer.writeheader()
        writer.writerows(row for row in rows if (row["run"] == "2025_04_07___16_33_47") == held)
        content = out.getvalue().encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return files


def test_a_held_file(lumi, tmp_path):
    known, held = lumi
    path = tmp_path / "p.json"
    words = ["--known", known, "--held", held, "--allocations", DATA / "pico_allocations.csv.gz"]
    done = in_process("published", *words, "--runs", DATA / "pico_runs.csv", "--json", path)
    facts = json.loads(path.read_text())
    assert {"rows", "median_error", "p90_error", "within_25"} <= set(facts)
    assert 0 <= facts["median_error"] <= facts["p90_error"]
    for row in facts["rows"]:
        assert {"system", "run", "algorithm", "bytes", "measured_us", "predicted_us"} <= set(row)
        assert row["run"] == "2025_04_07___16_33_47"
        assert row["predicted_us"] > 0
    seen = {(row["algorithm"], row["bytes"]) for row in facts["rows"]}
    assert ("rabenseifner_mpich", 1 << 20) in seen
    for algorithm, size in (
        ("recursive_doubling_mpich", 256),
        ("recursive_doubling_mpich", 1 << 17),
        ("ring_over", 2048),
    ):
        assert (algorithm, size) not in seen  # given
    assert not [name for name, _ in seen if "bine" in name or "default" in name]
    assert "ratio of two schemes" in done.stdout


def test_prices_of_a_run_are_a_cluster(lumi, tmp_path):
    known, _ = lumi
    words = ["--known", known, "--run", "2025_04_07___16_22_51", "--out", tmp_path / "lumi_then.toml"]
    in_process("published", *words)
    priced = in_process("simulate", "--cluster", tmp_path / "lumi_then.toml", "--ranks", 4)
    assert "recursive_doubling" in priced.stdout
    lone = in_process("published", "--known", known, "--run", "2025_04_07___16_22_51", code=2)
    assert lone.stderr.count("--out FILE.toml go together") == 1
    none = in_process("published", "--known", known, "--run", "never", "--out", tmp_path / "x.toml", code=2)
    assert none.stderr.count("--run never: there is no such run; take one of 2025_") == 1


def test_options_repeat(lumi):
    known, held = lumi
    both = in_process("published", "--known", known, "--known", held, "--held", held, "--wide")
    assert "rabenseifner_mpich" in both.stdout


@pytest.mark.parametrize("option", ["--known", "--held", "--allocations", "--runs"])
def test_a_file_of_another_kind(option, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("date,weather\n1,rain\n")
    done = in_process("published", option, other, code=2)
    assert "other.csv: no column" in done.stderr
    assert "file of another kind" in done.stderr


def test_nothing_to_predict(lumi, tmp_path):
    empty = tmp_path / "empty.csv"
    empty.write_text(lumi[0].read_text().partition("\n")[0] + "\n")
    for option, words in (("--held", "holds nothing to predict"), ("--known", "holds no all-reduction")):
        done = in_process("published", option, empty, "--json", tmp_path / "none.json", code=2)
        assert words in done.stderr
    assert not (tmp_path / "none.json").exists()
