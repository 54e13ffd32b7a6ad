"""Figures, by what their axes hold: which lines, of which points, with which ends."""

import made_results
import pandas
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from treeattn.errors import ArgumentError
from treeattn.study import figures
from treeattn.study.compare.rows import SUM
from treeattn.study.compare.summary import summarise


def frame(*keys, **fields):
    return pandas.DataFrame(summarise(made_results.row(key, n, **fields) for key in keys for n in range(6)))


@pytest.fixture
def sizes():
    """Reductions of three sizes, whole steps of one length."""
    reductions = [key for heads in (1, 4, 16) for key in made_results.keys(tokens=[0], heads=heads)]
    return frame(*reductions, *made_results.keys(tokens=[64]))


def lines(axes):
    """Label -> points, of lines with a mark."""
    held = axes.get_legend_handles_labels()
    return {
        label: list(map(tuple, handle.lines[0].get_xydata())) for handle, label in zip(*held, strict=True)
    }


def test_time_over_size_and_a_row_for_each_scheme_of_one_size(sizes):
    figure = figures.time(sizes, 5.0)
    reductions, steps = figure.axes
    assert (reductions.get_xlabel(), reductions.get_ylabel()) == ("bytes", "µs from the last entry")
    assert [label.get_text() for label in reductions.get_xticklabels()] == ["520", "2,080", "8,320"]
    drawn = lines(reductions)
    assert drawn.keys() == set(made_results.SCHEMES)
    chain = sizes[(sizes["label"] == "binary_tree") & (sizes["what"] == "reduce")].sort_values("bytes")
    for (x, y), size, time in zip(drawn["binary_tree"], chain["bytes"], chain["time_us"], strict=True):
        assert (x, y) == (pytest.approx(size, rel=0.1), time)  # beside the others' intervals
    assert len({points[0][0] for points in drawn.values()}) == len(drawn)
    assert steps.get_xlabel() == "µs from the last entry (64 tokens)"
    fastest = sizes[sizes["what"] == "decode"].sort_values("time_us")["label"].tolist()
    assert [label.get_text() for label in steps.get_yticklabels()] == fastest[::-1]
    assert figure.get_size_inches()[0] == 5


@pytest.mark.parametrize("width", [3.3, 6.5])
def test_one_legend_that_covers_nothing_and_a_look_of_its_own_for_an_own_schedule(width):
    """Intervals are wider than marks, even in a column."""
    own, known = (
        [key for heads in (1, 16) for key in made_results.keys(names, [0], heads=heads)]
        for names in (["mine@1"], ["chain", "ring"])
    )
    figure = figures.time(pandas.concat([frame(*own, schedule="{}"), frame(*known)]), width)
    FigureCanvasAgg(figure).draw()
    (legend,), (axes,) = figure.legends, figure.axes
    assert sorted(text.get_text() for text in legend.get_texts()) == ["chain", "mine@1", "ring"]
    assert not legend.get_window_extent().overlaps(axes.get_tightbbox())
    looks = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        line, caps, _ = handle.lines
        looks[label] = (line.get_marker(), line.get_color())
        assert all(cap.get_markersize() > 0.8 * line.get_markersize() for cap in caps)
        assert len(caps) == 2
    assert looks["mine@1"] == ("*", "black")
    assert len(set(looks.values())) == 3


def test_relative_to_the_baseline(sizes):
    (reductions, _) = figures.relative(sizes).axes
    assert reductions.get_ylabel() == f"time, relative to {SUM}"
    assert {y for _, y in lines(reductions)[SUM]} == {1.0}
    assert figures.relative(sizes[sizes["baseline"].isna()]) is None


def test_predicted_against_measured():
    known = {"predicted_us": 100.0, "predicted_low_us": 50.0, "predicted_high_us": 200.0}
    found = frame(*made_results.keys(["chain", "ring"], [0]), **known)
    (axes,) = figures.predicted(found).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted, µs", "measured, µs")
    times = found.set_index("label")["time_us"]
    assert lines(axes) == {name: [(100.0, times[name])] for name in ("chain", "ring")}
    diagonal = axes.lines[-1].get_xydata()
    assert (diagonal[:, 0] == diagonal[:, 1]).all()
    assert figures.predicted(frame(*made_results.keys(["chain"], [0]))) is None


@pytest.mark.parametrize(("form", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
@pytest.mark.slow
def test_files_are_the_same_whenever_they_are_drawn(sizes, form, start):
    first, second = (figures.content(figures.time(sizes, 3.3), form) for _ in range(2))
    assert first == second
    assert first.startswith(start)


@pytest.mark.parametrize(("text", "inches"), [("3.3in", 3.3), ("84mm", 3.307), ("8.4cm", 3.307)])
def test_widths(text, inches):
    assert figures.inches(text) == pytest.approx(inches, abs=1e-3)


@pytest.mark.parametrize("text", ["3", "in", "1in", "50in", "3ft", "nanin"])
def test_widths_that_are_none(text):
    with pytest.raises(ArgumentError, match="give 2in to 40in"):
        figures.inches(text)
