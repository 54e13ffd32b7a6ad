"""A schedule of one's own, from a file to the commands that take schemes."""

import json

import pytest

from tests.support import plans, schedules
from tests.support.drawn import sample
from treeattn.collectives import Schedule, build

from .launch import CACHE, in_process, treeattn


@pytest.fixture
def star(tmp_path):
    """As the command writes schedules."""
    path = tmp_path / "star.json"
    path.write_text(schedules.star(3).to_json())
    return path


def test_decode_and_compare_take_a_file(star, tmp_path):
    lines, words = tmp_path / "lines.jsonl", ("--check", "--repeat", 2, "--json", tmp_path / "facts.json")
    done = treeattn("decode", CACHE, "--scheme", f"{star},chain", *words, ranks=3)
    own = done.facts["results"][0]
    assert own["scheme"].startswith("star@")
    assert own["passed"]
    short = ("--bytes", "8Ki", "--repetitions", 2, "--out", lines)
    for _ in range(2):  # the second time all of it is in the file
        done = treeattn("compare", "--schemes", star, *short, ranks=3)
        assert own["scheme"] in done.stdout
    rows = [row for row in map(json.loads, lines.read_text().splitlines()) if row["scheme"] == own["scheme"]]
    assert len(rows) == 2
    assert Schedule.from_json(rows[0]["schedule"]).messages == rows[0]["messages_intra"] == 4


def test_schedules_of_one_name_stay_apart(tmp_path):
    """Two files that call themselves alike and do different things have two names in results."""
    names = set()
    for scheme in ("chain", "binary_tree"):
        path = tmp_path / f"{scheme}.json"
        path.write_text(Schedule("mine", 4, 1, build(scheme, 4).rounds).to_json())
        names.add(in_process("schedule", path).stdout.split(",")[0])
    assert len(names) == 2
    assert all(name.startswith("mine@") for name in names)


def test_a_file_is_drawn_and_exported(star, tmp_path):
    assert "round 1: 1->0, 2->0" in in_process("schedule", star).stdout
    again = tmp_path / "again.json"
    in_process("schedule", star, "--json", again)  # with the certificate beside it
    read = [in_process("schedule", path).stdout for path in (star, again)]
    assert read[0] == read[1]  # of one name, however often it is read and written
    done = treeattn("schedule", star, "--format", "goal", "--heads", 2, "--head-dim", 23)
    assert "recv 200b from 1" in done.stdout


def test_what_others_wrote_is_drawn_simulated_and_refused_if_damaged(tmp_path):
    path = tmp_path / "ring.xml"
    path.write_text(plans.msccl_ring(4))
    done = in_process("schedule", path)
    assert done.stdout.startswith(f"{path.stem}@")
    assert "class A" in done.stdout
    done = in_process("simulate", "--cluster", "dgx-h100", "--schemes", f"{path},ring")
    assert f"{path.stem}@" in done.stdout, done.stderr
    path.write_text(plans.msccl_ring(4)[:-30])
    done = in_process("schedule", path, code=2)
    assert str(path) in done.stderr


def test_a_schedule_for_other_ranks_is_refused_once(star):
    done = treeattn("decode", CACHE, "--scheme", star, ranks=2, code=2)
    assert done.stderr.count(f"{star}: size: the schedule is for 3 ranks, this job has 2: ") == 1
    assert "treeattn tune --ranks 2 --out" in done.stderr


@pytest.mark.parametrize("cluster", sample(1, [[], ["--cluster", "laptop"]]), ids=str)
def test_compare_goes_on_where_a_schedule_is_for_other_ranks(star, cluster):
    short = ("--bytes", "8Ki", "--repetitions", 1, *cluster)
    done = treeattn("compare", "--schemes", f"{star},chain", *short, ranks=2, code=1)
    assert "made for 3 ranks" in done.said
    assert "chain" in done.stdout
