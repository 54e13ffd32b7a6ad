"""Drawings and exports: against committed ones, and against the schedule that they show."""

from __future__ import annotations

import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter, deque
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from treeattn.collectives import Schedule, Transfer, build, check, names
from treeattn.collectives.catalog import needs_nodes
from treeattn.collectives.drawings import text as draw
from treeattn.errors import RestrictionError, ScheduleError

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
SCHEDULES = names("schedule")
SVG = "{http://www.w3.org/2000/svg}"


def golden_drawings():
    spec = importlib.util.spec_from_file_location("regenerate", GOLDEN / "regenerate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.drawings()


DRAWINGS = golden_drawings()


@pytest.mark.parametrize("file_name", sorted(DRAWINGS))
def test_drawings_are_the_committed_ones(file_name):
    committed = (GOLDEN / file_name).read_text()
    assert DRAWINGS[file_name] == committed, "if the change is meant: python tests/golden/regenerate.py"


def test_no_committed_drawing_is_left_over():
    kept = {path.name for path in GOLDEN.iterdir() if path.suffix in (".txt", ".svg", ".goal")}
    assert kept == set(DRAWINGS)


def on_nodes(name, size, per_node=4):
    nodes = (per_node,) * (size // per_node) + ((size % per_node,) if size % per_node else ())
    return (build(name, size, nodes=nodes) if needs_nodes(name) else build(name, size)), nodes


def of_sizes(*sizes):
    """A schedule of the catalogue, which a drawing does not know, and its nodes: `sizes` ranks of them."""
    return st.builds(on_nodes, st.sampled_from(SCHEDULES), st.sampled_from(sizes))


def between(schedule, nodes):
    node = [index for index, count in enumerate(nodes) for _ in range(count)]
    return sum(node[t.src] != node[t.dst] for round_ in schedule.rounds for t in round_)


# Text


def test_text_of_the_tree_of_the_docs():
    assert (
        draw.text(build("binary_tree", 5))
        == """\
binary_tree, 5 ranks
4 rounds · depth 4 · 8 messages · class A

round 1: 3->1, 4->1
round 2: 1->0, 2->0
round 3: 0=>1, 0=>2
round 4: 1=>3, 1=>4

round     1     2     3     4
       0 ───────▲─▲───●─●───────
       1 ─▲─▲───●─│───▼─┊───●─●─
       2 ─│─│─────●─────▼───┊─┊─
       3 ─●─│───────────────▼─┊─
       4 ───●─────────────────▼─

● sends, ▲ ▼ receives; │ merge, ┊ copy
"""
    )


def test_text_marks_chunks_and_nodes():
    schedule = build("reduce_scatter_gather", 4)
    text = draw.text(schedule, (2, 2))
    assert "round 1: 0->2[2-3], 1->3[2-3], 2->0[0-1], 3->1[0-1]" in text
    assert "round 2: 0->1[1], 1->0[0], 2->3[3], 3->2[2]" in text
    assert "16 messages (8 between nodes) · 4 chunks" in text
    assert "node 1  2 " in text
    assert "┃" in text
    assert "┃" not in draw.text(schedule)


@examples(60)
@given(of_sizes(2, 7, 16))
def test_pictures_have_straight_columns(drawn):
    schedule, nodes = drawn
    lines = draw.text(schedule, nodes).splitlines()
    picture = [line for line in lines if re.match(r"(node \d+)? *\d+ ─", line)]
    if picture:
        assert len(picture) == schedule.size
        assert len(set(map(len, picture))) == 1
        marks = Counter("".join(picture))
        drawn = sum(len({frozenset((t.src, t.dst)) for t in round_}) for round_ in schedule.rounds)
        assert marks["●"] + marks["▲"] + marks["▼"] == 2 * drawn, "two ranks that exchange share one line"
    else:
        assert max(map(len, lines)) > 80, "only large pictures are left out"


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


def parsed(schedule, nodes=None):
    return ElementTree.fromstring(draw.svg(schedule, nodes))


def arrows(root):
    group = root.iter(f"{SVG}g")
    return [path for g in group for path in g.iter(f"{SVG}path") if "transfer" in path.get("class", "")]


def ends(path):
    x1, y1, x2, y2 = map(
        float, re.fullmatch(r"M([\d.]+),([\d.]+) L([\d.]+),([\d.]+)", path.get("d")).groups()
    )
    return (x1, y1), (x2, y2)


@examples(60)
@given(of_sizes(1, 8, 16))
def test_svg_shows_every_transfer_once(drawn):
    schedule, nodes = drawn
    paths = arrows(parsed(schedule, nodes))
    shown = Counter(path.find(f"{SVG}title").text.split(",")[0] for path in paths)
    meant = Counter(f"round {i}: {t.arrow}" for i, round_ in enumerate(schedule.rounds, 1) for t in round_)
    assert shown == meant
    kinds = Counter("merge" in path.get("class").split() for path in paths)
    assert kinds[False] == sum(not t.merge for round_ in schedule.rounds for t in round_)
    assert sum("far" in path.get("class").split() for path in paths) == between(schedule, nodes)


@examples(60)
@given(of_sizes(8, 16, 32))
def test_svg_is_legible(drawn):
    """Everything lies inside the page and no two texts touch."""
    root = parsed(*drawn)
    width, height = float(root.get("width")), float(root.get("height"))
    boxes = [text_box(text) for text in root.iter(f"{SVG}text")]
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
    for a, b in combinations(sorted(boxes), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for path in arrows(root):
        (x1, _), (x2, y2) = ends(path)
        assert x2 > x1 + 20, "arrows run to the right"
        assert 0 < y2 < height
        assert x2 < width


def text_box(text):
    """Left, top, right and bottom, with letters a little narrower than the widest common font's."""
    kind = text.get("class", "")
    size = 15 if "title" in kind else 8.5 if "chunk" in kind else 11
    x, y, length = float(text.get("x")), float(text.get("y")), 0.6 * size * len(text.text)
    left = x - length * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor", "start")]
    return left, y - 0.75 * size, left + length, y + 0.1 * size


def test_svg_groups_lanes_by_node_also_when_ranks_are_scattered():
    nodes = ((0, 2, 4), (1, 3, 5))
    root = parsed(build("hierarchical", 6, nodes=nodes), nodes)
    bands = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "band"]
    labels = {t.text: float(t.get("y")) - 4 for t in root.iter(f"{SVG}text") if t.get("class") is None}
    for band, node in zip(bands, nodes, strict=True):
        top = float(band.get("y"))
        bottom = top + float(band.get("height"))
        lanes = {rank for rank in range(6) if top < labels[str(rank)] < bottom}
        assert lanes == set(node)
    assert float(bands[0].get("y")) + float(bands[0].get("height")) <= float(bands[1].get("y"))


def test_svg_title_states_the_certificate():
    schedule, nodes = on_nodes("recursive_doubling", 16)
    texts = [text.text for text in parsed(schedule, nodes).iter(f"{SVG}text")]
    assert texts[0] == "recursive_doubling, 16 ranks on 4 nodes"
    assert texts[1] == "4 rounds · depth 4 · 64 messages (32 between nodes) · class A"
    assert {"merge", "heavy: between nodes", "result stands"} <= set(texts)
    assert "copy" not in texts, "the legend shows what occurs"


def test_svg_lanes_turn_strong_when_the_result_stands():
    root = parsed(build("binary_tree", 5))
    lanes = [path for path in root.iter(f"{SVG}path") if path.get("class") == "done"][:5]
    assert [path.get("data-round") for path in lanes] == ["2", "3", "3", "4", "4"]


def test_svg_knows_dark_screens_and_print():
    svg = draw.svg(build("chain", 3))
    assert "@media screen and (prefers-color-scheme: dark)" in svg
    assert "var(" not in svg, "converters do not know CSS variables"
    assert ".schedule .copy { stroke-dasharray" in svg


def test_svg_of_too_many_ranks_is_refused_with_a_remedy():
    for name, size in (("binary_tree", 257), ("ring", 128)):
        with pytest.raises(
            RestrictionError, match="too large to draw: at most 256 ranks.*formats text, json or goal"
        ):
            draw.svg(build(name, size))


def test_names_are_escaped():
    schedule = Schedule('<&"', 2, 1, build("chain", 2).rounds)
    assert parsed(schedule).find(f"{SVG}text").text == '<&", 2 ranks'
    assert "<title>&lt;&amp;&quot; on 2 ranks</title>" in draw.html(schedule)


# HTML


@examples(30)
@given(of_sizes(9))
def test_html_steps_end_with_everything_held(drawn):
    schedule, nodes = drawn
    page = draw.html(schedule, nodes)
    steps = json.loads(re.search(r"const steps = (.*);", page)[1])
    assert len(steps) == len(schedule.rounds) + 1
    assert steps[0] == {"transfers": [], "held": [1] * 9}
    assert steps[-1]["held"] == [9] * 9
    assert [step["transfers"] for step in steps[1:]] == [[t.arrow for t in r] for r in schedule.rounds]
    for before, after in pairwise(steps):
        assert all(a <= b for a, b in zip(before["held"], after["held"], strict=True))


def test_html_stands_alone():
    page = draw.html(build("binary_tree", 6), (3, 3))
    outside = re.findall(r"(?:src|href)=|url\((?!#)|@import|fetch\(|https?://(?!www\.w3\.org/2000/svg)", page)
    assert not outside
    assert page.count('class="round"') == check(build("binary_tree", 6)).rounds
    for wanted in ("ArrowLeft", "ArrowRight", 'id="play"', 'type="range"'):
        assert wanted in page
    assert "%%" not in page


# GOAL


def goal_program(text):
    """Rank -> list of (label, words, labels that it requires)."""
    lines = text.splitlines()
    assert re.fullmatch(r"num_ranks \d+", lines[0])
    ranks, current = {}, None
    for line in lines[1:]:
        if start := re.fullmatch(r"rank (\d+) \{", line):
            current = ranks.setdefault(int(start[1]), {})
        elif dependency := re.fullmatch(r"(l\d+) requires (l\d+)", line):
            current[dependency[1]][1].add(dependency[2])
        elif operation := re.fullmatch(r"(l\d+): ((?:send|recv|calc) .*)", line):
            assert operation[1] not in current
            current[operation[1]] = (operation[2].split(), set())
        else:
            assert line in ("", "}")
    return ranks


def run_goal(ranks):
    """Execute the dependencies; returns bytes sent. Fails on a deadlock or an unmatched message."""
    sent, done, arrived, volume = deque(), {rank: set() for rank in ranks}, Counter(), 0
    progress = True
    while progress:
        progress = False
        for rank, operations in ranks.items():
            for name, (words, needed) in operations.items():
                if name in done[rank] or not needed <= done[rank]:
                    continue
                if words[0] == "recv":
                    message = (int(words[3]), rank, words[5], words[1])
                    if not arrived[message]:
                        continue
                    arrived[message] -= 1
                elif words[0] == "send":
                    arrived[rank, int(words[3]), words[5], words[1]] += 1
                    volume += int(words[1].removesuffix("b"))
                done[rank].add(name)
                progress = True
    assert not sent
    assert all(done[rank] == set(operations) for rank, operations in ranks.items()), "deadlock"
    assert not any(arrived.values()), "a message that nobody receives"
    return volume


@examples(60)
@given(of_sizes(1, 2, 7, 12))
def test_goal_runs_to_the_end_and_sends_the_volume(drawn):
    schedule, _ = drawn
    records = 4 * schedule.chunks
    ranks = goal_program(draw.goal(schedule, records=records, record_bytes=10))
    assert set(ranks) == set(range(schedule.size))
    assert run_goal(ranks) == round(check(schedule).volume * records * 10)


def test_goal_leaves_out_chunks_without_records():
    schedule = build("ring", 8)
    ranks = goal_program(draw.goal(schedule, records=2, record_bytes=10))
    assert run_goal(ranks) == round(check(schedule).volume * 2 * 10)
    sends = sum(words[0] == "send" for operations in ranks.values() for words, _ in operations.values())
    assert sends == schedule.messages / 4


def test_goal_charges_merges_to_the_receiver():
    text = draw.goal(build("binary_tree", 3), records=4, record_bytes=100, merge_nanoseconds=25)
    root = goal_program(text)[0]
    assert root["l3"] == (["calc", "200"], {"l1", "l2"})
    assert root["l4"] == (["send", "400b", "to", "1", "tag", "2"], {"l3"})
