"""What the figures show: which points belong together, and that each mark stands for its number."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import made_results
import pytest

from treeattn.decoder import plan as routes
from treeattn.errors import ArgumentError, BackendError
from treeattn.study import plot
from treeattn.study.compare.schema import NULL, SUM
from treeattn.study.figures import draw, style, times
from treeattn.study.figures import roofline as roofline_
from treeattn.study.figures.chart import Lines, Rows

MEASURED = Path(__file__).resolve().parents[2] / "data" / "compare.jsonl"


def study(*paths: Path):
    found, problems = plot.read(paths)
    assert problems == []
    found.baseline = SUM
    return found


@pytest.fixture
def made(tmp_path):
    return study(made_results.write(tmp_path / "made.jsonl", made_results.keys()))


def charts(name: str, found) -> dict:
    return {chart.name: chart for chart in plot.FIGURES[name].charts(found)}


def styles_of(found):
    return style.styles([*found.schemes(), "float32", "bfloat16"])


def intervals(axes) -> set[tuple[float, float]]:
    """(low, high) of every vertical bar."""
    return {
        (path.vertices[0][1], path.vertices[1][1]) for bars in axes.collections for path in bars.get_paths()
    }


def test_bars_are_the_intervals_of_the_summaries():
    found = study(MEASURED)
    chart = charts("time", found)["time-decode"]
    (axes,) = draw.draw(chart, styles_of(found)).axes
    of_steps = [summary for summary in found.summaries if summary.key.what == "decode"]
    wanted = {(s.times["completion"].low, s.times["completion"].high) for s in of_steps}
    assert len(wanted) == 12
    assert intervals(axes) == wanted
    heights = {float(y) for line in axes.lines if line.get_label()[0] != "_" for y in line.get_ydata()}
    assert heights == {summary.times["completion"].median for summary in of_steps}


def test_axes_say_what_they_show_and_in_which_unit(made):
    (axes,) = draw.draw(charts("time", made)["time-decode"], styles_of(made)).axes
    assert axes.get_xlabel() == "context length over all ranks, tokens"
    assert axes.get_ylabel() == "completion, µs"
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4Ki", "64Ki"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == made.schemes()
    assert set(legend) == set(made_results.SCHEMES)


def test_one_length_makes_rows_from_the_fastest(tmp_path):
    found = study(made_results.write(tmp_path / "one.jsonl", made_results.keys(tokens=[4096])))
    chart = charts("time", found)["time-decode"]
    assert isinstance(chart, Rows)
    assert chart.labels == (NULL, "kv_ring", "binary_tree", "mpi_allreduce", SUM)
    assert "4,096 tokens" in chart.case
    (axes,) = draw.draw(chart, styles_of(found)).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(chart.labels)


def test_ratios_pair_blocks_of_one_run(tmp_path):
    """Two jobs that both call themselves launch 1: no block meets one of the other job."""
    path = tmp_path / "jobs.jsonl"
    names = ("completion", "slowest", "after_last_entry")
    with path.open("w") as file:
        for run, slow in (("a", 1.0), ("b", 100.0)):
            file.write(json.dumps(made_results.run_line(run)) + "\n")
            for key, factor in zip(made_results.keys([SUM, "chain"], [4096]), (1.0, 3.0), strict=True):
                for repetition in range(6):
                    samples = {name: [slow * factor] for name in names}
                    line = made_results.point_line(key, repetition, run, samples=samples)
                    file.write(json.dumps(line) + "\n")
    found = study(path)
    (summary,) = (summary for summary in found.summaries if summary.key.scheme == "chain")
    assert summary.times["completion"].blocks == 12
    (chart,) = charts("relative", found).values()
    by_label = dict(zip(chart.labels, chart.panels[0].series[0].points, strict=True))
    assert by_label["chain"][1:] == pytest.approx((3.0, 3.0, 3.0))
    assert len(times._blocks(found, summary, "chain")) == 12


def test_ratios_pair_the_blocks_of_a_repetition(tmp_path):
    """A machine that becomes slower and slower for all schemes leaves their ratios alone."""
    path = tmp_path / "slower.jsonl"
    fast, slow = made_results.keys([SUM, "chain"], [4096])
    lines = [made_results.run_line()]
    for repetition in range(6):
        for key, factor in ((fast, 1.0), (slow, 3.0)):
            names = ("completion", "slowest", "after_last_entry")
            samples = {name: [factor * 10**repetition] for name in names}
            lines.append(made_results.point_line(key, repetition, samples=samples))
    path.write_text("\n".join(map(json.dumps, lines)))
    found = study(path)
    (chart,) = charts("relative", found).values()
    by_label = dict(zip(chart.labels, chart.panels[0].series[0].points, strict=True))
    assert by_label["chain"][1:] == pytest.approx((3.0, 3.0, 3.0))
    assert by_label[SUM][1:] == (1.0, 1.0, 1.0)


def test_speedup_is_the_time_of_the_ring_over_that_of_the_scheme(made):
    chart = charts("speedup", made)["speedup-decode"]
    series = {one.label: one.points for one in chart.series}
    times = {(s.key.scheme, s.key.tokens): s.times["completion"].median for s in made.summaries}
    for length, point in zip((4096, 65536), series["binary_tree"], strict=True):
        assert point.value == pytest.approx(times["kv_ring", length] / times["binary_tree", length], rel=1e-2)
    assert [point.value for point in series["kv_ring"]] == [1.0, 1.0]
    assert NULL not in series


def test_fewer_than_six_blocks_have_hollow_marks_and_no_bars(tmp_path):
    found = study(made_results.write(tmp_path / "few.jsonl", made_results.keys(), repetitions=5))
    (axes,) = draw.draw(charts("time", found)["time-decode"], styles_of(found)).axes
    assert intervals(axes) == set()
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert sum(len(line.get_xdata()) for line in hollow) == 2 * len(made_results.SCHEMES)


def test_memory_and_traffic_are_what_the_points_say():
    found = study(MEASURED)
    memory = charts("memory", found)["memory-decode"]
    held = dict(zip(memory.labels, memory.panels[0].series[0].points, strict=True))
    assert held["ring"].value == 39938  # at 16384 tokens, the longer of the two
    traffic = charts("traffic", found)["traffic-reduce"]
    sent, messages = traffic.panels
    row = traffic.labels.index("ring")
    assert [next(p.value for p in s.points if p.x == row) for s in sent.series] == [12672, 0]
    assert [next(p.value for p in s.points if p.x == row) for s in messages.series] == [24, 0]
    assert (traffic.labels.index("mpi_allreduce"), "the library decides") in sent.absent
    drawn = draw.draw(traffic, styles_of(found))
    assert [axes.get_xlabel() for axes in drawn.axes] == ["bytes", "messages"]
    widths = {bar.get_width() for axes in drawn.axes for bar in axes.patches}
    assert {12672.0, 24.0, 0.0} <= widths


def test_payload_that_is_known_in_part(tmp_path):
    """Sums without tiers, and messages that a library cuts as it likes."""
    path = tmp_path / "sums.jsonl"
    sent = (
        {"intra": [3, 30], "inter": [4, 40]},
        {"intra": [0, 0], "inter": [0, 0], "unknown": [None, 70]},
        None,
        {"intra": [None, 80], "inter": [0, 0]},  # a library's messages, on one node
    )
    keys = made_results.keys(["chain", "two_allreduce", "mpi_allreduce", "three_allreduce"], [4096])
    lines = [made_results.point_line(key, sent=told) for key, told in zip(keys, sent, strict=True)]
    path.write_text("\n".join(map(json.dumps, [made_results.run_line(), *lines])))
    (chart,) = charts("traffic", study(path)).values()
    rows = {name: row for row, name in enumerate(chart.labels)}
    bytes_, messages = chart.panels
    values = {s.label: {int(p.x): p.value for p in s.points} for s in bytes_.series}
    chain, unknown = rows["chain"], rows["two_allreduce"]
    cut = rows["three_allreduce"]
    assert values == {
        "intra": {chain: 30, cut: 80}, "inter": {chain: 40, cut: 0}, "both together": {unknown: 70},
    }  # fmt: skip
    assert {row for row, _ in bytes_.absent} == {rows["mpi_allreduce"]}
    assert {row for row, _ in messages.absent} == {rows["mpi_allreduce"], unknown, cut}
    assert [(p.x, p.value) for s in messages.series for p in s.points] == [(chain, 3), (chain, 4)]


def test_predictions_are_drawn_only_where_points_carry_them(made, tmp_path):
    assert charts("predicted", made) == {}
    path = tmp_path / "predicted.jsonl"
    key, other = made_results.keys(["chain", "ring"], [4096])
    point = made_results.point_line(key, predicted=7.5)
    lines = [made_results.run_line(), point, made_results.point_line(other)]
    path.write_text("\n".join(map(json.dumps, lines)))
    (chart,) = charts("predicted", study(path)).values()
    (series,) = chart.series
    assert series.label == "chain"
    assert [(p.x, p.value) for p in series.points] == [(point["samples"]["completion"][1], 7.5)]
    (axes,) = draw.draw(chart, style.styles(["chain"])).axes
    assert axes.get_xlabel() == "measured completion (median), µs"
    assert axes.get_ylabel() == "predicted, µs"


def test_scaling_joins_jobs_of_several_sizes_but_no_two_placements(tmp_path):
    path = tmp_path / "sizes.jsonl"
    for size in (2, 4):
        keys = made_results.keys(["chain"], [4096], ranks=size)
        made_results.write(path, keys, run=f"of {size}", nodes=[0] * size)
    found, problems = plot.read([path])
    assert problems == []
    (chart,) = charts("scaling", found).values()
    assert [point.x for point in chart.series[0].points] == [2, 4]
    cyclic = made_results.keys(["chain"], [4096], ranks=4)
    made_results.write(path, cyclic, run="cyclic", nodes=[0, 1, 0, 1])
    assert charts("scaling", plot.read([path])[0]) == {}
    times = charts("time", plot.read([path])[0])
    assert set(times) == {
        "time-decode-ranks2-layout2", "time-decode-ranks4-layout4", "time-decode-ranks4-layout2+2_cyclic",
    }  # fmt: skip
    assert "nodes of 2+2 cyclic" in times["time-decode-ranks4-layout2+2_cyclic"].case


@pytest.mark.parametrize(
    ("nodes", "words", "suffix"),
    [
        ([0] * 4, "4 ranks on one node", "4"),
        ([0, 1, 0, 1], "4 ranks on nodes of 2+2 cyclic", "2+2_cyclic"),
        ([n // 8 for n in range(1024)], "1024 ranks on nodes of 128x8", "128x8"),
        ([0, 0, 1, 1, 2, 2, 3], "7 ranks on nodes of 3x2+1", "3x2+1"),
    ],
)
def test_layouts_have_short_names(tmp_path, nodes, words, suffix):
    path = made_results.write(
        tmp_path / "a.jsonl", made_results.keys(ranks=len(nodes)), nodes=range(len(nodes))
    )
    made_results.write(path, made_results.keys(ranks=len(nodes)), run="other", nodes=nodes)
    made = charts("time", plot.read([path])[0])
    assert len(made) == 2
    assert made[f"time-decode-layout{suffix}"].case.startswith(words + " · ")


def test_ranks_that_slept_are_no_part_of_the_layout(tmp_path):
    """The first 2 of 4 ranks, and a job of 2: one figure."""
    path = made_results.write(tmp_path / "a.jsonl", made_results.keys(ranks=2))
    made_results.write(path, made_results.keys(ranks=2), run="other", nodes=(0, 0))
    study, problems = plot.read([path])
    assert problems == []
    assert charts("time", study)["time-decode"].case.startswith("2 ranks on one node · ")


def test_versions_are_never_mixed(tmp_path):
    path = tmp_path / "two.jsonl"
    made_results.write(path, made_results.keys())
    software = made_results.run_line()["software"] | {"git": "f" * 16}
    made_results.write(path, made_results.keys(), run="newer", software=software)
    found, problems = plot.read([path])
    assert len(problems) == 1
    made = charts("time", found)
    assert set(made) == {"time-decode-build1", "time-decode-build2"}
    assert "0123456789ab" in made["time-decode-build1"].notes[1]
    assert "ffffffffffff" in made["time-decode-build2"].notes[1]


def test_skew_and_records_have_their_own_axes(tmp_path):
    path = tmp_path / "skew.jsonl"
    keys = [k for skew in (0.0, 100.0) for k in made_results.keys(["chain"], [4096], skew=skew)]
    keys += [k for b in (1, 2) for k in made_results.keys(["chain"], [0], what="reduce", batch=b)]
    found = study(made_results.write(path, keys))
    (skew,) = charts("skew", found).values()
    assert [point.x for point in skew.series[0].points] == [0.0, 100.0]
    assert not skew.x_log
    reduce = charts("time", found)["time-reduce"]
    assert [point.x for point in reduce.series[0].points] == [16 * 130 * 4, 2 * 16 * 130 * 4]
    assert reduce.x_label == "records of a rank, bytes"


def test_roofline_shows_both_percentages():
    row = {"dtype": "float32", "group": 4, "threads": 1, "tokens": 1000, "percent_of_read_rate": 50.0,
           "percent_of_bound": 90.0}  # fmt: skip
    measured = {"read_rate_gb_s": 10.0, "rows": [row], "cpu": "No CPU", "isa": "none"}
    assert roofline_.is_roofline(measured)
    for wrong in ({}, {"rows": []}, measured | {"rows": [{}]}, [], {"rows": [row]}):
        assert not roofline_.is_roofline(wrong)
    (chart,) = charts("roofline", plot.Study(rooflines={"file": measured})).values()
    (axes,) = draw.draw(chart, style.styles(["float32"])).axes
    assert axes.get_xlabel() == "%"
    assert [bar.get_width() for bar in axes.patches] == [50.0, 90.0]


def test_roofline_of_a_gpu_shows_percent_of_its_copy_rate():
    row = {"dtype": "float32", "group": 4, "tokens": 1000, "percent_of_copy_rate": 80.0}
    measured = {"copy_rate_gb_s": 3000.0, "rows": [row], "device": {"name": "No GPU", "driver": "1"}}
    assert roofline_.is_roofline(measured)
    (chart,) = charts("roofline", plot.Study(rooflines={"file": measured})).values()
    assert chart.notes[1].startswith("No GPU, driver 1")
    (axes,) = draw.draw(chart, style.styles(["float32"])).axes
    assert axes.get_xlabel() == "% of the copy rate"
    assert [bar.get_width() for bar in axes.patches] == [80.0]


def test_cold_and_warm_are_three_marks_a_scheme(made):
    (chart,) = charts("cold", made).values()
    assert [series.label for series in chart.panels[0].series] == ["planning", "first call", "warm step"]
    summary = next(s for s in made.summaries if (s.key.scheme, s.key.tokens) == ("kv_ring", 65536))
    row = chart.labels.index("kv_ring")
    values = [series.points[row].value for series in chart.panels[0].series]
    assert values == [summary.times[name].median for name in ("plan", "first", "completion")]


def test_every_scheme_keeps_a_style_of_its_own(tmp_path):
    many = [*routes.CATALOG, *(f"k_ary_tree:radix={radix}" for radix in range(3, 20)), SUM, NULL]
    chosen = style.styles(many)
    assert len({(s.colour, s.marker) for s in chosen.values()}) == len(many)
    assert len({(s.marker, str(s.dashes)) for s in chosen.values()}) == len(many)  # without any colour
    found = study(made_results.write(tmp_path / "m.jsonl", made_results.keys(), repetitions=1))
    styles = styles_of(found)
    for name in ("time", "memory"):
        for chart in charts(name, found).values():
            if isinstance(chart, Lines):
                (axes,) = draw.draw(chart, styles).axes
                colours = {line.get_label(): line.get_color() for line in axes.lines}
                assert colours["kv_ring"] == styles["kv_ring"].colour


def test_many_long_names_stay_inside_the_picture_and_apart(tmp_path):
    long = "hierarchical:inner=(k_nomial_tree:radix=4):outer=recursive_doubling"
    schemes = [*routes.CATALOG, *(f"k_ary_tree:radix={radix}" for radix in range(3, 9)), long, SUM]
    found = study(made_results.write(tmp_path / "m.jsonl", made_results.keys(schemes), repetitions=1))
    for name, figure in (("time", "time-decode"), ("traffic", "traffic-decode")):
        drawn = draw.draw(charts(name, found)[figure], styles_of(found))
        drawn.draw_without_rendering()
        axes = drawn.axes[0]
        texts = axes.get_legend().get_texts() if name == "time" else axes.get_yticklabels()
        boxes = sorted((text.get_window_extent() for text in texts), key=lambda box: -box.y1)
        assert len(boxes) >= 20
        for upper, lower in itertools.pairwise(boxes):
            assert lower.y1 <= upper.y0 + 1
        for box in boxes:
            assert box.x0 >= 0
            assert box.x1 <= drawn.bbox.x1
            assert box.y0 >= 0
            assert box.y1 <= drawn.bbox.y1


def test_files_are_the_same_each_time_and_without_a_date(made):
    chart = charts("time", made)["time-decode"]
    first, second = (draw.render(chart, styles_of(made)) for _ in range(2))
    assert first == second
    assert first["png"].startswith(b"\x89PNG\r\n\x1a\n")
    assert ElementTree.fromstring(first["svg"]).tag.endswith("svg")
    assert b"date>" not in first["svg"]


def test_notes_name_the_machine_warnings_and_what_failed(tmp_path):
    path = tmp_path / "noted.jsonl"
    key, other = made_results.keys(["chain", "ring"], [4096])
    made_results.write(path, [key], warning="4 ranks share 2 cores")
    failed = {"kind": "error", "format": 1, "run": "made", "launch": 1, "message": "no",
              "key": made_results.point_line(other)["key"]}  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(failed) + "\n")
    (chart,) = charts("time", study(path)).values()
    assert chart.notes[1:] == (
        "treeattn 1.0 (0123456789ab), MPI of nobody, No CPU, ranks 2+2; started 2020-01-01.",
        "Warning: 4 ranks share 2 cores.",
        "Could not run here: ring.",
    )


def test_points_twice_or_without_a_time_are_left_out_and_named(tmp_path):
    path, copy = tmp_path / "one.jsonl", tmp_path / "copy.jsonl"
    (key,) = made_results.keys(["chain"], [4096])
    made_results.write(path, [key])
    copy.write_text(path.read_text())
    found, problems = plot.read([path, copy, path])
    assert problems == ["6 points measured twice: left out"]
    assert found.summaries[0].times["completion"].blocks == 6
    with path.open("a") as file:
        for samples in ({}, {"completion": [0.0]}, {"completion": [float("nan")]}):
            file.write(json.dumps(made_results.point_line(key, 9, samples=samples)) + "\n")
    found, problems = plot.read([path])
    assert len(problems) == 3
    assert all("left out" in problem for problem in problems)
    assert found.summaries[0].times["completion"].blocks == 6


def test_unknown_names(made):
    with pytest.raises(ArgumentError, match="pie.*choose from all, time"):
        plot.choose_figures("time,pie")
    with pytest.raises(ArgumentError, match="chain: not among these results; choose from binary_tree"):
        plot.choose_baseline(made, "chain")
    assert plot.choose_baseline(made, "binary_tree") == "binary_tree"
    assert plot.choose_baseline(made, None) == SUM


def test_without_matplotlib_the_remedy_is_named(made, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(BackendError, match=r"pip install 'treeattn\[plot\]'"):
        draw.render(charts("time", made)["time-decode"], styles_of(made))
