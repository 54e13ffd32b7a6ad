"""The results file: what is on disk survives, what is broken is named, one writer at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from treeattn.errors import ArgumentError
from treeattn.study import results
from treeattn.study.results import FLOOR, FORMAT, NULL, Key, Writer

SAMPLE = Path(__file__).resolve().parents[1] / "data" / "compare.jsonl"
KEY = Key("reduce", "ring", 4, 0, 1, 1, 16, 16, 128, "bfloat16")
RUN = {
    "software": {"packages": {"treeattn": "0.1.0"}, "git": None, "mpi": "M 1"},
    "ranks": [{"node": 0, "cpu": "C"}, {"node": 1, "cpu": "C"}],
}
POINT = {
    "key": KEY, "launch": 1, "plan": 9.0, "first": 3.0, "late": 1, "same_bits": True, "digest": "d",
    "error_out": 1e-8, "samples": {"completion": [1.0, 2.0, 3.0]},
}  # fmt: skip


def fill(path, repetitions=3, run="a", **changes):
    with Writer(path) as writer:
        writer.append("run", run, **{**RUN, **changes})
        for repetition in range(repetitions):
            writer.append("point", run, repetition=repetition, **POINT)


def test_what_was_written_is_read(tmp_path):
    fill(tmp_path / "r")
    found = results.read(tmp_path / "r")
    assert found.problems == []
    assert [point["key"] for point in found.points] == [KEY] * 3
    (summary,) = results.summarise(found)
    assert summary.times["completion"].count == 9
    assert summary.times["completion"].median == 2.0
    assert summary.times["plan"].median == 9.0
    assert summary.facts["late"] == 3
    assert summary.facts["same_bits"] is True


def test_a_line_cut_off_is_named_and_costs_nothing_else(tmp_path):
    path = tmp_path / "r"
    fill(path)
    path.write_bytes(path.read_bytes()[:-40])
    with Writer(path) as writer:
        writer.append("point", "a", repetition=2, **POINT)
    found = results.read(path)
    assert [point["repetition"] for point in found.points] == [0, 1, 2]
    (problem,) = found.problems
    assert f"{path}:4" in problem


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"5",
        b"[]",
        b"{}",
        b'{"kind": "point", "format": 1}',
        b'{"kind": "poem", "format": 1, "run": "a", "key": {}}',
        b'{"kind": "run", "format": 1, "run": "b"}',
        json.dumps({"kind": "point", "format": FORMAT, "run": "a", "key": {"what": "reduce"}}).encode(),
        json.dumps({"kind": "point", "format": FORMAT + 1, "run": "a"}).encode(),
    ],
)
def test_broken_lines_are_named(tmp_path, line):
    path = tmp_path / "r"
    fill(path)
    path.write_bytes(path.read_bytes() + line + b"\n")
    fill(path, run="c")
    found = results.read(path)
    assert len(found.points) == 6
    (problem,) = found.problems
    assert f"{path}:5" in problem


def test_samples_that_are_not_numbers_are_refused(tmp_path):
    path = tmp_path / "r"
    fill(path, 1)
    with Writer(path) as writer:
        writer.append("point", "a", repetition=1, **{**POINT, "samples": {"completion": [math.nan]}})
        writer.append("point", "a", repetition=2, **{**POINT, "samples": {"completion": []}})
    found = results.read(path)
    assert len(found.points) == 1
    assert len(found.problems) == 2


def test_points_without_their_run_are_left_out(tmp_path):
    path = tmp_path / "r"
    with Writer(path) as writer:
        writer.append("point", "gone", repetition=0, **POINT)
    found = results.read(path)
    assert found.points == []
    assert len(found.problems) == 1


def test_versions_are_kept_apart_and_named(tmp_path):
    path = tmp_path / "r"
    fill(path)
    fill(path, run="b", software={**RUN["software"], "mpi": "M 2"})
    fill(path, run="c", ranks=RUN["ranks"][:1])
    found = results.read(path)
    assert len(results.summarise(found)) == 3
    (problem,) = found.problems
    assert all(mpi in problem for mpi in ("M 1", "M 2"))


def test_cyclic_and_block_placement_are_different(tmp_path):
    def of(nodes):
        return results.version({**RUN, "ranks": [{"node": node, "cpu": "C"} for node in nodes]})

    assert len({of([0, 0, 1, 1]), of([0, 1, 0, 1]), of([0, 0, 0, 1])}) == 3


def test_jobs_of_one_version_add_up(tmp_path):
    fill(tmp_path / "one")
    fill(tmp_path / "two", run="b")
    (summary,) = results.summarise(results.read(tmp_path / "one", tmp_path / "two"))
    assert summary.times["completion"].blocks == 6


def test_a_second_writer_is_refused(tmp_path):
    with Writer(tmp_path / "r"), pytest.raises(ArgumentError, match="another run is appending"):
        Writer(tmp_path / "r")
    Writer(tmp_path / "r").close()


def test_places_that_cannot_be(tmp_path):
    with pytest.raises(ArgumentError, match="cannot be written"):
        Writer(tmp_path)
    with pytest.raises(ArgumentError, match="cannot be read"):
        results.read(tmp_path / "none")


def test_the_sample_of_a_real_run():
    found = results.read(SAMPLE)
    assert found.problems == []
    summaries = results.summarise(found)
    assert {summary.key.what for summary in summaries} == {"reduce", "decode"}
    assert {FLOOR, NULL, "binary_tree"} <= {summary.key.scheme for summary in summaries}
    for summary in summaries:
        facts = summary.facts
        assert summary.times["completion"].blocks == 6
        assert facts["scheduled"] is None or facts["sent"] == facts["scheduled"]
        assert facts["error_out"] is None or facts["error_out"] <= facts["bound_out"]
