"""What the figures show: which points belong together, and that each mark stands for its number."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import made_results
import pytest
from msgspec import structs

from treeattn.decoder import plan as routes
from treeattn.errors import ArgumentError
from treeattn.study import plot
from treeattn.study.compare.schema import NULL, SUM
from treeattn.study.figures import draw, style, times
from treeattn.study.figures import roofline as roofline_
from treeattn.study.figures.cases import RANKS, cases, left_out
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


def intervals(axes, upright: bool) -> set[tuple[float, float]]:
    """(low, high) of every line through a mark."""
    return {tuple(path.vertices[:, int(upright)]) for lines in axes.collections for path in lines.get_paths()}


def marks(axes):
    """The marks that stand for points, which carry their value as label."""
    return [line for line in axes.lines if line.get_label()[0] != "_"]


def test_lines_through_marks_are_the_intervals_of_the_summaries():
    found = study(MEASURED)
    chart = charts("time", found)["time-decode"]
    drawn = draw.draw(chart).axes
    assert [panel.title for panel in chart.panels] == ["4Ki tokens", "16Ki tokens"]
    for axes, tokens in zip(drawn, (4096, 16384), strict=True):
        mine = [s for s in found.summaries if (s.key.what, s.key.tokens) == ("decode", tokens)]
        times_of = [s.times["after_last_entry"] for s in mine]  # ranks entered far apart in that run
        wanted = {(time.low, time.high) for time in times_of}
        assert len(wanted) == 6
        assert intervals(axes, upright=False) == wanted
        assert {line.get_xdata()[0] for line in marks(axes)} == {time.median for time in times_of}


def test_an_interval_is_upright_where_a_time_equals_its_place(tmp_path):
    """2048 µs at 2048 tokens."""
    keys = made_results.keys(["chain"], [1024, 2048, 4096, 8192])
    samples = {name: [2048.0] for name in ("completion", "slowest", "after_last_entry")}
    lines = [made_results.point_line(key, block, samples=samples) for key in keys for block in range(6)]
    path = tmp_path / "equal.jsonl"
    path.write_text("\n".join(map(json.dumps, [made_results.run_line(), *lines])))
    (axes,) = draw.draw(charts("time", study(path))["time-decode"]).axes
    middles = {tuple(lines.get_paths()[0].vertices[:, 0]) for lines in axes.collections}
    assert middles == {(float(key.tokens),) * 2 for key in keys}


def test_axes_say_what_they_show_and_in_which_unit(made):
    drawn = draw.draw(charts("time", made)["time-decode"]).axes
    assert [axes.get_title("left") for axes in drawn] == ["4Ki tokens", "64Ki tokens"]
    assert {axes.get_xlabel() for axes in drawn} == {"completion, µs"}
    assert {axes.get_xscale() for axes in drawn} == {"log"}
    names = [label.get_text() for label in drawn[0].get_yticklabels()]
    assert set(names) == set(made_results.SCHEMES)
    ends = {s.key.scheme: s.times["completion"].median for s in made.summaries if s.key.tokens == 65536}
    assert names == sorted(names, key=ends.get)


def test_more_lengths_than_panels_beside_each_other_make_small_multiples(tmp_path):
    lengths = [1 << shift for shift in range(10, 17)]
    found = study(made_results.write(tmp_path / "long.jsonl", made_results.keys(tokens=lengths)))
    chart = charts("time", found)["time-decode"]
    assert isinstance(chart, Lines)
    drawn = draw.draw(chart)
    assert [axes.get_title("left") for axes in drawn.axes] == [series.label for series in chart.series]
    assert [series.label for series in chart.series] == found.schemes()
    assert (drawn.subfigs[0].get_supxlabel(), drawn.subfigs[0].get_supylabel()) == (
        "context length over all ranks, tokens",
        "completion, µs",
    )
    for axes, series in zip(drawn.axes, chart.series, strict=True):
        assert [line.get_ydata()[0] for line in marks(axes)] == [point.value for point in series.points]
        assert intervals(axes, upright=True) == {(point.low, point.high) for point in series.points}
        assert sum(line.get_label() == "_other" for line in axes.lines) == len(chart.series)
    shown = [label.get_text() for label in drawn.axes[-1].get_xticklabels()]
    assert set(shown) <= {"1Ki", "2Ki", "4Ki", "8Ki", "16Ki", "32Ki", "64Ki"}
    assert len(shown) >= 2


def test_one_length_makes_rows_from_the_fastest(tmp_path):
    found = study(made_results.write(tmp_path / "one.jsonl", made_results.keys(tokens=[4096])))
    chart = charts("time", found)["time-decode"]
    assert isinstance(chart, Rows)
    assert chart.labels == (NULL, "kv_ring", "binary_tree", "mpi_allreduce", SUM)
    assert "4,096 tokens" in chart.case
    (axes,) = draw.draw(chart).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(chart.labels)


def test_ratios_pair_the_blocks_of_a_repetition_of_one_run(tmp_path):
    """A machine that becomes slower for all leaves ratios alone, and so do two jobs both called launch 1."""
    lines = []
    for run, slow in (("a", 1.0), ("b", 100.0)):
        lines.append(made_results.run_line(run))
        for key, factor in zip(made_results.keys([SUM, "chain"], [4096]), (1.0, 3.0), strict=True):
            for repetition in range(6):
                names = ("completion", "slowest", "after_last_entry")
                samples = {name: [slow * factor * 10**repetition] for name in names}
                lines.append(made_results.point_line(key, repetition, run, samples=samples))
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = study(path)
    (summary,) = (summary for summary in found.summaries if summary.key.scheme == "chain")
    assert summary.times["completion"].blocks == 12
    (chart,) = charts("relative", found).values()
    by_label = dict(zip(chart.labels, chart.panels[0].series[0].points, strict=True))
    assert by_label["chain"][1:4] == pytest.approx((3.0, 3.0, 3.0))
    assert by_label[SUM][1:4] == (1.0, 1.0, 1.0)
    (case,) = cases(found)
    assert len(times._blocks(case, summary, "chain")) == 12


def test_speedup_is_the_time_of_the_ring_over_that_of_the_scheme(made):
    chart = charts("speedup", made)["speedup-decode"]
    times = {(s.key.scheme, s.key.tokens): s.times["completion"].median for s in made.summaries}
    for length, panel in zip((4096, 65536), chart.panels, strict=True):
        values = {chart.labels[point.x]: point.value for point in panel.series[0].points}
        ratio = times["kv_ring", length] / times["binary_tree", length]
        assert values["binary_tree"] == pytest.approx(ratio, rel=1e-2)
        assert values["kv_ring"] == 1.0
        assert NULL not in values


def test_fewer_than_six_blocks_have_hollow_marks_and_no_intervals(tmp_path):
    found = study(made_results.write(tmp_path / "few.jsonl", made_results.keys(), repetitions=5))
    for axes in draw.draw(charts("time", found)["time-decode"]).axes:
        assert intervals(axes, upright=False) == set()
        hollow = [line for line in marks(axes) if line.get_markerfacecolor() == style.PAPER]
        assert len(hollow) == len(marks(axes)) == len(made_results.SCHEMES)


def test_memory_and_traffic_are_what_the_points_say():
    found = study(MEASURED)
    memory = charts("memory", found)["memory-decode"]
    held = dict(zip(memory.labels, memory.panels[0].series[0].points, strict=True))
    assert held["ring"].value == 39938  # at 16384 tokens, the longer of the two
    traffic = charts("traffic", found)["traffic-reduce"]
    sent, messages = traffic.panels
    row = traffic.labels.index("ring")
    for panel, value in ((sent, 12672), (messages, 24)):
        (series,) = panel.series  # one node: nothing goes between nodes
        assert series.label == "intra"
        assert next(p.value for p in series.points if p.x == row) == value
    assert (traffic.labels.index("mpi_allreduce"), "the library decides") in sent.absent
    drawn = draw.draw(traffic)
    assert [axes.get_xlabel() for axes in drawn.axes] == ["bytes", "messages"]
    assert {12672.0, 24.0} <= {line.get_xdata()[0] for axes in drawn.axes for line in marks(axes)}
    assert {"12,672", "24"} <= {text.get_text() for axes in drawn.axes for text in axes.texts}


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
    ratio = dict.fromkeys(("ratio", "ratio_low", "ratio_high"), 1.0)
    estimate = {"time": 7.5, "low": 7.0, "high": 9.0, **ratio}
    lines = [made_results.point_line(key, n, estimate=estimate) for n in range(6)]
    lines = [made_results.run_line(), *lines, made_results.point_line(other)]
    path.write_text("\n".join(map(json.dumps, lines)))
    (chart,) = charts("predicted", study(path)).values()
    (series,) = chart.series
    assert series.label == "chain"
    (found,) = (s.times["completion"] for s in study(path).summaries if s.key.scheme == "chain")
    assert series.points == ((found.median, 7.5, 7.0, 9.0, found.low, found.high),)
    assert found.low < found.median
    drawn = draw.draw(chart)
    (axes,) = drawn.axes
    assert drawn.subfigs[0].get_supxlabel() == "measured completion (median), µs"
    assert drawn.subfigs[0].get_supylabel() == "predicted, µs"
    (mark,) = marks(axes)
    assert (mark.get_xdata()[0], mark.get_ydata()[0]) == tuple(series.points[0][:2])
    upright, across = (lines.get_segments()[0].tolist() for lines in axes.collections)
    assert across == [[found.low, 7.5], [found.high, 7.5]]
    assert upright == [[found.median, 7.0], [found.median, 9.0]]


def test_scaling_joins_jobs_of_several_sizes_but_no_two_placements(tmp_path):
    path = tmp_path / "sizes.jsonl"
    for size in (2, 4):
        keys = made_results.keys(["chain"], [4096], ranks=size)
        made_results.write(path, keys, run=f"of {size}", nodes=[0] * size)
    found, problems = plot.read([path])
    assert problems == []
    (chart,) = charts("scaling", found).values()
    assert [point.x for point in chart.series[0].points] == [2, 4]
    assert chart.left_out == ()
    cyclic = made_results.keys(["chain"], [4096], ranks=4)
    made_results.write(path, cyclic, run="cyclic", nodes=[0, 1, 0, 1])
    found = plot.read([path])[0]
    assert charts("scaling", found) == {}
    missing = left_out(found, RANKS)
    assert len(missing) == 3
    assert all("sizes.jsonl: decoding step, " in line for line in missing)
    assert missing[2].endswith(": others differ in nodes")
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
    keys = made_results.keys(ranks=len(nodes))
    path = made_results.write(tmp_path / "a.jsonl", keys, 1, nodes=range(len(nodes)))
    made_results.write(path, keys, 1, run="other", nodes=nodes)
    made = charts("time", plot.read([path])[0])
    assert len(made) == 2
    assert made[f"time-decode-layout{suffix}"].case.startswith(words + " · ")


def test_a_figure_is_never_drawn_in_another_folder(tmp_path):
    """Whatever the results say, of which its name has parts."""
    path = made_results.write(tmp_path / "a.jsonl", made_results.keys())
    strange = {"dtype": "/../../bf16", "arrivals": "../../late:1us"}
    made_results.write(path, made_results.keys(**strange), run="other")
    found, _ = plot.read([path])
    names = [chart.name for figure in plot.FIGURES.values() for chart in figure.charts(found)]
    assert any("bf16" in name and "late" in name for name in names)
    assert all(Path(name).name == name for name in names)


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


def test_arrivals_and_records_have_their_own_axes(tmp_path):
    path = tmp_path / "arrivals.jsonl"
    keys = [
        k for at in ("together", "random:100us") for k in made_results.keys(["chain"], [4096], arrivals=at)
    ]
    keys += [k for b in (1, 2) for k in made_results.keys(["chain"], [0], what="reduce", batch=b)]
    found = study(made_results.write(path, keys))
    (late,) = charts("arrivals", found).values()
    assert [point.x for point in late.series[0].points] == [0.0, 100.0]
    assert not late.x_log
    reduce = charts("time", found)["time-reduce"]
    assert [panel.title for panel in reduce.panels] == ["8,320 bytes", "16,640 bytes"]


def test_roofline_shows_both_percentages():
    row = {"dtype": "float32", "group": 4, "threads": 1, "tokens": 1000, "percent_of_read_rate": 50.0,
           "percent_of_bound": 90.0}  # fmt: skip
    measured = {"read_rate_gb_s": 10.0, "rows": [row], "cpu": "No CPU", "isa": "none"}
    assert roofline_.is_roofline(measured)
    for wrong in ({}, {"rows": []}, measured | {"rows": [{}]}, [], {"rows": [row]}):
        assert not roofline_.is_roofline(wrong)
    (chart,) = charts("roofline", plot.Study(rooflines={"file": measured})).values()
    (axes,) = draw.draw(chart).axes
    assert axes.get_xlabel() == "%"
    assert [line.get_xdata()[0] for line in marks(axes)] == [50.0, 90.0]


def test_roofline_of_a_gpu_shows_percent_of_its_copy_rate():
    row = {"dtype": "float32", "group": 4, "tokens": 1000, "percent_of_copy_rate": 80.0}
    measured = {"copy_rate_gb_s": 3000.0, "rows": [row], "device": {"name": "No GPU", "driver": "1"}}
    assert roofline_.is_roofline(measured)
    (chart,) = charts("roofline", plot.Study(rooflines={"file": measured})).values()
    assert chart.notes[1].startswith("No GPU, driver 1")
    (axes,) = draw.draw(chart).axes
    assert axes.get_xlabel() == "% of the copy rate"
    assert [line.get_xdata()[0] for line in marks(axes)] == [80.0]


def test_cold_and_warm_are_three_marks_a_scheme(made):
    (chart,) = charts("cold", made).values()
    assert [series.label for series in chart.panels[0].series] == ["planning", "first call", "warm step"]
    summary = next(s for s in made.summaries if (s.key.scheme, s.key.tokens) == ("kv_ring", 65536))
    row = chart.labels.index("kv_ring")
    values = [series.points[row].value for series in chart.panels[0].series]
    assert values == [summary.times[name].median for name in ("plan", "first", "completion")]


def test_every_scheme_has_one_look_and_no_two_the_same():
    looks = {name: style.style(name) for name in [*routes.CATALOG, SUM, NULL]}
    assert len(set(looks.values())) == len(looks)
    for name in routes.CATALOG:
        assert style.style(f"{name}:radix=7") == looks[name]
        red, green, blue = (int(looks[name].colour[place : place + 2], 16) for place in (1, 3, 5))
        assert len({red, green, blue}) > 1
    for name in (SUM, NULL):  # neutral
        assert len({looks[name].colour[place : place + 2] for place in (1, 3, 5)}) == 1


def test_a_scheme_over_each_transport_of_gpus(tmp_path):
    """Side by side in one figure, each divided by the sum of its own wire."""
    ways = [(SUM, "host"), (SUM, "nccl"), ("ring", "host"), ("ring", "nccl"), (NULL, "none")]
    (by_scheme,) = ({key.scheme: key for key in made_results.keys(dict(ways), [4096], device="cuda")},)
    keys = [structs.replace(by_scheme[scheme], transport=over) for scheme, over in ways]
    found = study(made_results.write(tmp_path / "gpu.jsonl", keys))
    chart = charts("time", found)["time-decode"]
    assert set(chart.labels) == {
        "ring [host]", "ring [nccl]", "MPI_Allreduce(SUM) [host]", "ncclAllReduce(sum)", NULL,
    }  # fmt: skip
    assert chart.case.endswith("on GPUs")
    assert len(charts("relative", found)["relative-decode"].labels) == 4
    assert style.style("ring [nccl]") == style.style("ring:chunks=2 [host]") == style.style("ring")
    assert style.style("ncclAllReduce(sum)") == style.style(SUM)
    draw.render(chart, ("svg",))


def test_processors_and_gpus_have_figures_of_their_own(tmp_path):
    path = made_results.write(tmp_path / "both.jsonl", made_results.keys(["ring"], [4096]))
    made_results.write(
        path, made_results.keys(["ring"], [4096], device="cuda", transport="host"), run="other"
    )
    assert set(charts("time", study(path))) == {"time-decode-devicecpu", "time-decode-devicecuda"}


@pytest.mark.parametrize("schemes", [("kv_ring",), ("ring", "kv_ring"), made_results.SCHEMES], ids=len)
def test_a_scheme_has_one_colour_whatever_else_is_drawn(schemes, tmp_path):
    """Also where its name is the only one, in rows and in lines."""
    wanted = style.style("kv_ring").colour
    keys = made_results.keys(schemes)
    found = study(made_results.write(tmp_path / "m.jsonl", keys, repetitions=1))
    chart = charts("time", found)["time-decode"]
    row = chart.labels.index("kv_ring")
    drawn = draw.draw(chart).axes
    for axes in drawn:
        (mine,) = (line for line in marks(axes) if line.get_ydata()[0] == drawn[0].get_yticks()[row])
        assert mine.get_color() == wanted
    chart = charts("memory", found)["memory-decode-growth"]
    axes = next(axes for axes in draw.draw(chart).axes if axes.get_title("left") == "kv_ring")
    assert {line.get_color() for line in marks(axes)} == {wanted}


@pytest.mark.slow
def test_many_long_names_stay_inside_the_picture_and_apart(tmp_path):
    long = "hierarchical:inner=(k_nomial_tree:radix=4):outer=recursive_doubling"
    schemes = [*routes.CATALOG, *(f"k_ary_tree:radix={radix}" for radix in range(3, 9)), long, SUM]
    found = study(made_results.write(tmp_path / "m.jsonl", made_results.keys(schemes), repetitions=1))
    for name, figure in (("time", "time-decode"), ("traffic", "traffic-decode")):
        drawn = draw.draw(charts(name, found)[figure])
        assert drawn.get_size_inches()[0] == 7.5  # 720 pixels of a page
        drawn.draw_without_rendering()
        texts = drawn.axes[0].get_yticklabels()
        boxes = sorted((text.get_window_extent() for text in texts), key=lambda box: -box.y1)
        assert len(boxes) >= 20
        for upper, lower in itertools.pairwise(boxes):
            assert lower.y1 <= upper.y0 + 1
        for box in boxes:
            assert box.x0 >= 0
            assert box.x1 <= drawn.bbox.x1
            assert box.y0 >= 0
            assert box.y1 <= drawn.bbox.y1


def test_files_are_the_same_each_time_and_follow_a_dark_screen(tmp_path):
    """Of an SVG nothing but the two rules names ink or paper; a PDF has outlines that publishers take."""
    found = study(made_results.write(tmp_path / "m.jsonl", made_results.keys(["chain", "ring"], [4096])))
    chart = charts("time", found)["time-decode"]
    first, second = (draw.render(chart, draw.FORMATS, 3.3) for _ in range(2))
    assert first == second
    assert first["png"].startswith(b"\x89PNG\r\n\x1a\n")
    assert first["pdf"].startswith(b"%PDF")
    assert b"/Type3" not in first["pdf"]
    text = first["svg"].decode()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "date>" not in text
    assert "@media screen and (prefers-color-scheme: dark)" in text
    before, _, after = text.partition("</style>")
    for colour in (style.INK, style.PAPER):
        assert colour in before
        assert colour not in after
    assert "#000000" not in after
    assert "currentColor" in after
    assert 'class="paper"' in after


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


def test_unknown_names(made):
    with pytest.raises(ArgumentError, match="chain: not among these results; choose from binary_tree"):
        plot.choose_baseline(made, "chain")
    assert plot.choose_baseline(made, "binary_tree") == "binary_tree"
    assert plot.choose_baseline(made, None) == SUM


# Figures that a paper prints


@pytest.mark.parametrize("name", ["time", "traffic"])
def test_a_column_of_a_paper_holds_the_figure(made, name):
    """At 3.3 inches, without a title: nothing beyond the edges, no labels on top of each other."""
    for chart in charts(name, made).values():
        figure = draw.draw(chart, 3.3, titled=False)
        renderer = agg(figure).get_renderer()
        figure.draw(renderer)
        assert figure.get_figwidth() == 3.3
        assert figure.get_suptitle() == ""
        edge = figure.bbox.width
        for axes in figure.axes:
            box = axes.get_tightbbox(renderer)
            assert -2 <= box.x0 <= box.x1 <= edge + 2
            assert axes.bbox.width > 0.2 * edge / len(figure.axes)
            shown = [label.get_window_extent(renderer) for label in visible_ticks(axes.xaxis)]
            shown.sort(key=lambda box: box.x0)
            assert all(a.x1 <= b.x0 + 1 for a, b in itertools.pairwise(shown))


def agg(figure):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return FigureCanvasAgg(figure)


def visible_ticks(axis):
    low, high = sorted(axis.get_view_interval())
    ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=False)
    return [label for place, label in ticks if low <= place <= high and label.get_text()]


@pytest.mark.parametrize("ends", [(100, 110), (130, 180), (80, 300), (9, 1100), (1, 10**6), (3, 3)])
@pytest.mark.parametrize("room", [3, 9])
def test_logarithmic_axes_have_three_labels(ends, room):
    from matplotlib.figure import Figure

    from treeattn.study.figures.pictures import value_axis

    figure = Figure()
    axes = figure.subplots()
    axes.plot(ends, [1, 2])
    value_axis(axes.xaxis, True, ends, room)
    figure.canvas.draw()
    labels = {label.get_text() for label in visible_ticks(axes.xaxis)}
    assert 3 <= len(labels) <= room + 6


def test_own_schedules_have_marks_of_their_own():
    looks = {style.style(f"mine@{number:06x}") for number in range(36)}
    assert len(looks) == 36
    assert not {look.marker for look in looks} & set(style.MARKERS)
