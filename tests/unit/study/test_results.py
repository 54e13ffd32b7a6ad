"""The results file: what is on disk survives, what is broken is named, one writer at a time."""

from __future__ import annotations

import io
import json
import lzma
import math
from pathlib import Path

import made_results
import msgspec
import pytest
from msgspec import structs
from msgspec.structs import asdict

from treeattn.cli import compare_table
from treeattn.errors import ArgumentError, BackendError
from treeattn.report import Report
from treeattn.study import plot
from treeattn.study.compare import results
from treeattn.study.compare.results import Writer
from treeattn.study.compare.schema import FORMAT, NULL, SUM, Key, Point, Run

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "compare.jsonl"
KEY = Key("reduce", "ring", 4, 0, 1, 1, 16, 16, 128, "bfloat16")
RUN = {
    "kind": "run",
    "format": FORMAT,
    "software": {"packages": {"treeattn": "0.1.0"}, "git": None, "mpi": "M 1"},
    "ranks": [{"node": 0, "cpu": "C"}, {"node": 1, "cpu": "C"}],
}
POINT = {
    "format": FORMAT, "key": KEY, "launch": 1, "plan": 9.0, "first": 3.0, "late": 1, "clock_error": 0.0,
    "same_bits": True, "digest": "d", "determinism": "A", "rounds": 2, "depth": 2,
    "sent": {"intra": [4, 64], "inter": [0, 0]},
    "scheduled": {"intra": [4, 64], "inter": [0, 0]}, "held": 100, "step_peak": 0,
    "error_out": 1e-8, "error_lse": 1e-8, "bound_out": 1e-6, "bound_lse": 1e-6,
    "samples": {name: [1.0, 2.0, 3.0] for name in ("completion", "slowest", "after_last_entry")},
}  # fmt: skip


def shown(run, summaries):
    """Whether all passed, and the tables."""
    made, screen = Report({}), io.StringIO()
    passed = compare_table.show(made, run, summaries, {})
    made.show(wide=True, file=screen)
    return passed, screen.getvalue()


def run_of(run, fields=RUN):
    return msgspec.convert({**fields, "run": run}, Run)


def fill(path, repetitions=3, run="a", **changes):
    with Writer(path) as writer:
        writer.append(run_of(run, RUN | changes))
        for repetition in range(repetitions):
            writer.append(Point(run=run, repetition=repetition, **POINT))


def test_what_was_written_is_read(tmp_path):
    fill(tmp_path / "r")
    found = results.read(tmp_path / "r")
    assert found.problems == []
    assert [point.key for point in found.points] == [KEY] * 3
    (summary,) = results.summarise(found)
    assert summary.times["completion"].count == 9
    assert summary.times["completion"].median == 2.0
    assert summary.times["plan"].median == 9.0
    assert summary.facts["late"] == 3
    assert summary.facts["same_bits"] is True


def of_case(tmp_path, spread, **times):
    """Summaries of one case: scheme -> median completion, of which ranks entered `spread` apart."""
    unjudged = dict.fromkeys(("digest", "error_out", "error_lse", "bound_out", "bound_lse", "same_bits"))
    path = tmp_path / f"{spread} apart"
    with Writer(path) as writer:
        writer.append(run_of("a"))
        for scheme, time in times.items():
            samples = {"completion": [time], "slowest": [time], "after_last_entry": [time - spread]}
            facts = POINT | {"key": structs.replace(KEY, scheme=scheme), "samples": samples}
            facts |= unjudged if scheme in (SUM, NULL) else {}
            writer.append(Point(run="a", repetition=0, **facts))
    return results.summarise(results.read(path))


@pytest.mark.parametrize(("spread", "series"), [(9.0, "completion"), (11.0, "after_last_entry")])
def test_schemes_are_compared_from_the_last_entry_where_entries_are_far_apart(tmp_path, spread, series):
    """A tenth of the fastest scheme; the sum is none. Without the row that does nothing it is not known."""
    times = {NULL: 20.0, "ring": 100.0, "chain": 250.0, SUM: 20.0}
    assert results.compared_series(of_case(tmp_path, spread, **times)) == series
    assert results.compared_series(of_case(tmp_path, 2 * spread, ring=100.0)) == "completion"


def test_the_table_says_what_times_are_counted_from(tmp_path):
    texts = []
    for spread in (1.0, 30.0):
        summaries = of_case(tmp_path, spread, **{NULL: 40.0, "ring": 90.0, SUM: 60.0})
        texts.append(shown(run_of("a"), summaries)[1])
    near, apart = texts
    assert "from the last rank's entry" not in near
    assert "from first" not in near
    assert "times in µs, from the last rank's entry" in apart
    assert "from first" in apart
    ratios = [next(line for line in text.splitlines() if line.startswith("ring ")) for text in texts]
    assert "1.50" in ratios[0]  # 90 / 60, completions
    assert "2.00" in ratios[1]  # 60 / 30, from the last entry


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_line_cut_off_is_named_once_and_costs_nothing_else(tmp_path, cut):
    """The reader names it; the next writer removes it and says so; after that the file is whole again."""
    path = tmp_path / "r"
    fill(path)
    path.write_bytes(path.read_bytes()[: -1 - cut])
    assert [problem.partition(": ")[0] for problem in results.read(path).problems] == [f"{path}:4"]
    with Writer(path) as writer:
        (problem,) = writer.held.problems
        assert problem.startswith(f"{path}:4: not a result line (")
        assert problem.endswith("removed: it was cut short")
        writer.append(Point(run="a", repetition=2, **POINT))
    found = results.read(path)
    assert [point.repetition for point in found.points] == [0, 1, 2]
    assert found.problems == []


def test_a_whole_last_line_without_its_end_is_kept(tmp_path):
    path = tmp_path / "r"
    fill(path)
    path.write_bytes(path.read_bytes()[:-1])
    with Writer(path) as writer:
        assert writer.held.problems == []
        writer.append(Point(run="a", repetition=3, **POINT))
    found = results.read(path)
    assert [point.repetition for point in found.points] == [0, 1, 2, 3]
    assert found.problems == []


def test_a_first_line_that_a_full_disk_cut_short_is_removed(tmp_path):
    path = tmp_path / "r"
    path.write_bytes(b'{"kind":"run","form')
    fill(path)
    assert results.read(path).problems == []


@pytest.mark.parametrize("content", [b"notes", b"{\n 1", b'{"rows": []}\n', b"\x00" * 9])
def test_what_is_no_file_of_results_is_never_cut(tmp_path, content):
    path = tmp_path / "r"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match="is not a file of results"):
        Writer(path)
    assert path.read_bytes() == content


def test_a_file_of_something_else_is_named_once(tmp_path):
    path, picture = tmp_path / "r", tmp_path / "picture"
    fill(path)
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + b"{no\nresults\n" * 100)
    found = results.read(path, picture)
    assert len(found.points) == 3
    assert found.problems == [f"{picture}: is not a file of results; left out"]


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
        b'{"kind": "run", "format": 1, "run": "b", "software": {"mpi": 5}, "ranks": []}',
        b"[" * 100_000,
        b"NaN",
        b"1" * 5000,
        b"\x00",
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


HOSTILE = [None, True, 5, -1, 10**400, "x", "nan", [], {}, [1], [None], {"a": 1}, {"intra": [1]}]


def hostile_variants(value):
    """`value` with each part of it, at any depth, missing or replaced by what does not belong there."""
    yield from HOSTILE
    if isinstance(value, dict):
        for name, part in value.items():
            yield {other: value[other] for other in value if other != name}
            yield from ({**value, name: variant} for variant in hostile_variants(part))
    elif isinstance(value, list) and value:
        yield from ([variant, *value[1:]] for variant in hostile_variants(value[0]))


def test_nothing_that_a_line_may_hold_stops_the_readers(tmp_path):
    """Every table and figure of a file in which every field of every kind of line is wrong once."""
    path = made_results.write(tmp_path / "r", made_results.keys())
    good = results.summarise(results.read(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    error = {
        "kind": "error",
        "format": FORMAT,
        "run": "made",
        "key": asdict(KEY),
        "launch": 1,
        "message": "-",
    }
    hostile = [{**lines[0], "run": "other"}, lines[1], lines[-1], error]
    with path.open("a") as file:
        for line in hostile:
            for number, variant in enumerate(hostile_variants(line)):
                if isinstance(variant, dict) and variant.get("repetition") == line.get("repetition"):
                    variant = {**variant, "repetition": 10 + number} if "repetition" in line else variant
                file.write(json.dumps(variant) + "\n")
    found, problems = plot.read([path])
    assert len(problems) > 1000
    of_key = {(row.key, row.version): row for row in found.summaries}
    for row in good:
        assert of_key[row.key, row.version].times["completion"].blocks >= row.times["completion"].blocks
    run = msgspec.convert(lines[0], Run)
    assert shown(run, found.summaries)[1]
    for figure in plot.FIGURES.values():
        figure.charts(found)


def test_a_block_that_is_there_twice_counts_once(tmp_path):
    path = tmp_path / "r"
    fill(path)
    path.write_bytes(path.read_bytes() * 2)
    found = results.read(path)
    assert [point.repetition for point in found.points] == [0, 1, 2]
    assert found.problems == ["3 points measured twice: left out"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_wrong_block_among_right_ones_is_told(tmp_path, place):
    """NaN compares with nothing, and the worst of all blocks is not the last one."""
    path = tmp_path / "r"
    wrong = {"error_out": math.nan, "bound_lse": 1e-7, "sent": {"intra": [4, 63], "inter": [0, 0]}}
    with Writer(path) as writer:
        writer.append(run_of("a", RUN))
        for repetition in range(3):
            fields = POINT | wrong if repetition == place else POINT
            writer.append(Point(run="a", **{**fields, "repetition": repetition}))
    (summary,) = results.summarise(results.read(path))
    assert math.isnan(summary.facts["error_out"])
    assert summary.facts["bound_lse"] == 1e-7
    assert summary.facts["sent"] != summary.facts["scheduled"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"same_bits": False}, "different bits"),
        ({"error_out": 1e-5}, "above the bound"),
        ({"error_lse": math.nan}, "above the bound"),
        ({"sent": {"intra": [4, 63], "inter": [0, 0]}}, "the schedule says"),
    ],
)
def test_the_table_names_what_is_wrong(tmp_path, changes, reason):
    with Writer(tmp_path / "r") as writer:
        writer.append(run_of("a", RUN))
        writer.append(Point(run="a", **(POINT | changes), repetition=0))
    passed, text = shown(run_of("a"), results.summarise(results.read(tmp_path / "r")))
    assert passed is (reason is None)
    assert ("wrong: ring: " in text) == (reason is not None)
    assert reason is None or reason in text


def test_samples_that_are_no_times_are_left_out(tmp_path):
    """Such as those that no clock could resolve, which are written: they stop no run."""
    path = tmp_path / "r"
    fill(path, 1)
    good = json.loads(path.read_text().splitlines()[1])
    with path.open("a") as file:
        for repetition, wrong in enumerate((["nan"], [], [0.0, 1.0]), 1):
            samples = good["samples"] | {"completion": wrong}
            file.write(json.dumps(good | {"repetition": repetition, "samples": samples}) + "\n")
    found = results.read(path)
    assert len(found.points) == 1
    assert len(found.problems) == 3
    assert "completion is not above 0" in found.problems[2]


def test_points_without_their_run_are_left_out(tmp_path):
    path = tmp_path / "r"
    with Writer(path) as writer:
        writer.append(Point(run="gone", repetition=0, **POINT))
    found = results.read(path)
    assert found.points == []
    assert len(found.problems) == 1


def test_versions_are_kept_apart_and_named(tmp_path):
    path = tmp_path / "r"
    fill(path)
    fill(path, run="b", software={**RUN["software"], "mpi": "M 2"})
    found = results.read(path)
    assert len(results.summarise(found)) == 2
    (problem,) = found.problems
    assert all(mpi in problem for mpi in ("M 1", "M 2"))


def on(*nodes, cpu="C"):
    """A run line of ranks on these nodes."""
    return run_of("a", RUN | {"ranks": [{"node": node, "cpu": cpu} for node in nodes]})


def emulated(run, made_by):
    """The same on a cluster that is emulated so."""
    return msgspec.structs.replace(run, environment={"TREEATTN_EMULATED": made_by})


def test_placement_is_that_of_the_ranks_that_a_point_used():
    block, cyclic, uneven = on(0, 0, 1, 1), on(0, 1, 0, 1), on(0, 0, 0, 1)

    def versions(ranks, per_node, *runs):
        return {results.version(run, (ranks, per_node)) for run in runs}

    assert len(versions(4, None, block, cyclic, uneven)) == 3
    assert len(versions(2, None, block, uneven, on(0, 0))) == 1
    delays = [block, *(emulated(block, f"--nodes 2 --delay {delay}ms") for delay in (1, 2))]
    assert len(versions(4, None, *delays)) == 3
    assert len(versions(2, None, block, cyclic)) == 2
    assert len(versions(1, None, block, cyclic, uneven, on(0))) == 1
    assert len(versions(1, None, on(0), on(0, cpu="D"))) == 2
    assert block.used((4, 1)) == [block.ranks[0], block.ranks[2]]
    assert versions(2, 1, block, cyclic) == versions(2, None, on(0, 1))
    assert versions(3, 2, uneven).pop().endswith("ranks 2+1")


def test_jobs_of_several_sizes_are_not_mixed_versions():
    jobs = [on(0), on(0, 0), on(0, 0, 1, 1)]
    assert results.mixed_versions([(job, (len(job.ranks), None)) for job in jobs]) is None
    assert results.mixed_versions([(on(0, 0), (2, None)), (on(0, 1), (2, None))]).count("ranks") == 2
    newer = run_of("b", RUN | {"software": RUN["software"] | {"mpi": "M 2"}})
    assert "M 2" in results.mixed_versions([(on(0), (1, None)), (newer, (2, None))])


def test_a_second_writer_is_refused(tmp_path):
    with Writer(tmp_path / "r"), pytest.raises(ArgumentError, match="another run is appending"):
        Writer(tmp_path / "r")
    Writer(tmp_path / "r").close()


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    with Writer(tmp_path / "r") as writer:
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(BackendError, match="cannot be written .No space left.*is kept"):
            writer.append(run_of("a", RUN))


def test_places_that_cannot_be(tmp_path):
    with pytest.raises(ArgumentError, match="not an ordinary file"):
        Writer("/dev/full")
    with pytest.raises(ArgumentError, match="cannot be written"):
        Writer(tmp_path)
    with pytest.raises(ArgumentError, match="cannot be read"):
        results.read(tmp_path / "none")


def test_the_sample_of_a_real_run():
    found = results.read(SAMPLE)
    assert found.problems == []
    summaries = results.summarise(found)
    assert {summary.key.what for summary in summaries} == {"reduce", "decode"}
    assert {SUM, NULL, "binary_tree"} <= {summary.key.scheme for summary in summaries}
    for summary in summaries:
        facts = summary.facts
        assert summary.times["completion"].blocks == 6
        assert facts["scheduled"] is None or facts["sent"] == facts["scheduled"]
        assert facts["error_out"] is None or facts["error_out"] <= facts["bound_out"]


def test_compressed_results_are_read_and_not_appended_to(tmp_path):
    path = made_results.write(tmp_path / "r.jsonl", made_results.keys())
    small = tmp_path / "r.jsonl.xz"
    small.write_bytes(lzma.compress(path.read_bytes()))
    assert results.read(small) == results.read(path)
    with pytest.raises(ArgumentError, match=r"r\.jsonl\.xz: is compressed: decompress it"):
        Writer(small)
    assert results.read(small) == results.read(path)
    small.write_bytes(small.read_bytes()[:-20])
    with pytest.raises(ArgumentError, match=r"r\.jsonl\.xz: cannot be decompressed"):
        results.read(small)


def test_what_was_there_before_stays_though_it_is_empty(tmp_path):
    """A device, or a file that another process has only just made."""
    path = tmp_path / "results.jsonl"
    path.touch()
    Writer(path).close()
    assert path.exists()
    Writer(tmp_path / "new.jsonl").close()
    assert not (tmp_path / "new.jsonl").exists()
