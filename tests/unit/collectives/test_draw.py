"""Drawings and exports: against committed ones, and against the schedule that they show."""

import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden import regenerate
from tests.support.drawn import examples
from treeattn.collectives import Schedule, Transfer, build, names
from treeattn.collectives.catalog import needs_nodes
from treeattn.collectives.clusters.description import load
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.drawings import text as draw
from treeattn.collectives.drawings.timeline import rounds, ticks, timeline
from treeattn.errors import RestrictionError, ScheduleError

GOLDEN = regenerate.HERE
SCHEDULES = names("schedule")
SVG = "{http://www.w3.org/2000/svg}"


DRAWINGS = regenerate.drawings()


@pytest.mark.parametrize("file_name", sorted(DRAWINGS))
def test_drawings_are_the_committed_ones(file_name):
    committed = (GOLDEN / file_name).read_text()
    assert DRAWINGS[file_name] == committed, "if the change is meant: python tests/golden/regenerate.py"


def test_no_committed_drawing_is_left_over():
    kept = {path.name for path in GOLDEN.iterdir() if path.suffix in (".txt", ".svg", ".goal")}
    assert kept == set(DRAWINGS)


# Text


def test_text_of_large_schedules_stays_short():
    lines = draw.text(build("recursive_doubling", 1024)).splitlines()
    assert len(lines) == 13
    assert lines[3].endswith("63->62, and 960 more")
    assert draw.text(build("chain", 1)) == "chain, 1 rank\n0 rounds · depth 0 · 0 messages · class A\n\n"


@pytest.mark.parametrize("form", [draw.text, draw.svg, draw.html, draw.goal])
def test_a_schedule_that_does_not_check_is_not_drawn(form):
    with pytest.raises(ScheduleError, match="lacks"):
        form(Schedule("half", 2, 1, ((Transfer(1, 0),),)))


@pytest.mark.parametrize("form", [draw.text, draw.svg, draw.html])
def test_nodes_must_fit(form):
    with pytest.raises(RestrictionError, match="hold 3 ranks"):
        form(build("chain", 4), (2, 1))


# SVG


def test_svg_of_too_many_ranks_is_refused_with_a_remedy():
    for name, size in (("binary_tree", 257), ("ring", 128)):
        with pytest.raises(
            RestrictionError, match="too large to draw: at most 256 ranks.*formats text, json or goal"
        ):
            draw.svg(build(name, size))


# Over time


@pytest.mark.parametrize("time", [0.7, 1.0, 7.2, 9.99, 14.3, 59.0, 98.4, 40917.0])
def test_ticks_are_1_2_or_5_apart(time):
    found = ticks(time)
    assert found[0] == 0
    assert 5 <= len(found) <= 11
    assert found[-1] <= time < found[-1] + found[1]
    assert f"{found[1]:.0e}"[0] in "125"
    assert len(f"{found[1]:g}".strip("0.")) == 1, "one digit"


def test_a_simulation_is_drawn_with_its_waits_and_its_critical_path():
    """A chain of messages from rank to rank that ends with the step; lanes are busy or hatched until then."""
    cluster = load("dgx-h100")
    found = simulate(build("hierarchical", 16, nodes=(8, 8)), cluster, tuple(range(16)))
    root = ElementTree.fromstring(timeline(found))
    assert [text.text for text in root.iter(f"{SVG}text")].count("node 1") == 1
    left, right = 96.0, 996.0
    busy = sum(float(bar.get("width")) for bar in root.iter(f"{SVG}rect") if "bar" in bar.get("class"))
    assert busy == pytest.approx(sum(found.ends) / found.time * (right - left), rel=0.01)
    (critical,) = (path for path in root.iter(f"{SVG}path") if path.get("class") == "critical")
    points = [tuple(map(float, at.split(","))) for at in critical.get("d")[1:].split(" L")]
    assert (points[0][0], points[-1][0]) == (left, right)
    assert points == sorted(points, key=lambda at: at[0])
    paths = ElementTree.fromstring(rounds(found)).iter(f"{SVG}path")
    marked = [path for path in paths if {"transfer", "critical"} <= {*path.get("class", "").split()}]
    ways = [
        re.match(r"round \d+: (\d+)[-=]>(\d+)", path.find(f"{SVG}title").text).groups() for path in marked
    ]
    assert len(ways) == 7
    assert all(one[1] == other[0] for one, other in pairwise(ways))
    assert sum("far" in path.get("class") for path in marked) == 1


# HTML


@examples(30)
@given(st.sampled_from(SCHEDULES))
def test_html_steps_end_with_everything_held(name):
    nodes = (4, 4, 1)
    schedule = build(name, 9, **({"nodes": nodes} if needs_nodes(name) else {}))
    page = draw.html(schedule, nodes)
    steps = json.loads(re.search(r"const steps = (.*);", page)[1])
    assert len(steps) == len(schedule.rounds) + 1
    assert steps[0] == {"transfers": [], "held": [1] * 9}
    assert steps[-1]["held"] == [9] * 9
    assert [step["transfers"] for step in steps[1:]] == [[t.arrow for t in r] for r in schedule.rounds]
    for before, after in pairwise(steps):
        assert all(a <= b for a, b in zip(before["held"], after["held"], strict=True))


# GOAL


def test_goal_is_of_the_records_that_are_given():
    """What waits for what is in the golden drawings."""
    text = draw.goal(build("ring", 2), records=6, record_bytes=10, group=2)
    assert re.findall(r"send (\d+)b", text) == ["40", "20", "20", "40"]
