"""Figures of a frame of summaries (`treeattn.study.compare.summary`), by matplotlib."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import pandas
from matplotlib import ticker
from matplotlib.figure import Figure

from treeattn.errors import ArgumentError
from treeattn.study.compare.rows import settings

WIDTH = 6.5  # inches
_COLUMN = 5.0  # inches, below which a figure is as narrow as a column
_STYLE: Any = {
    "font.size": 8, "legend.fontsize": 7, "axes.grid": True, "grid.alpha": 0.3,
    "svg.hashsalt": "treeattn", "svg.fonttype": "none", "figure.constrained_layout.use": True,
}  # fmt: skip
_MARKERS, _COLOURS = "osD^vP", [f"C{number}" for number in range(10)]
_OWN_MARKERS = "*Xhp"  # of schedules of one's own, in black


def time(frame: pandas.DataFrame, width: float = WIDTH) -> Figure | None:
    """Time over size, with intervals: over bytes of reductions, over tokens of whole steps."""
    sized = _sized(frame)
    return _panels(sized, width, "time_us", "low_us", "high_us", "µs from the last entry")


def relative(frame: pandas.DataFrame, width: float = WIDTH) -> Figure | None:
    """Ratios to the baseline within repetitions, with intervals."""
    sized = _sized(frame[frame["ratio"].notna()])
    named = " or ".join(sorted(sized["baseline"].dropna().unique()))
    return _panels(sized, width, "ratio", "ratio_low", "ratio_high", f"time, relative to {named}")


def scaling(frame: pandas.DataFrame, width: float = WIDTH) -> Figure | None:
    """Time over the number of ranks, of what was measured on several."""
    sized = _sized(frame)
    panels = [_words(row, f"{row['x']:,} {row['unit']}") for _, row in sized.iterrows()]
    found = sized.assign(x=sized["ranks"], unit="ranks", panel=panels)
    several = found.groupby("panel")["x"].transform("nunique") > 1
    return _panels(found[several], width, "time_us", "low_us", "high_us", "µs from the last entry")


def predicted(frame: pandas.DataFrame, width: float = WIDTH) -> Figure | None:
    """Measured over predicted, each with its interval, and where they are equal."""
    known = frame[frame["predicted_us"].notna()]
    if known.empty:
        return None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, 0.8 * width))
        axes = figure.add_subplot()
        for label, style in _styles(known):
            of = known[known["label"] == label]
            of_x = _reach(of, "predicted_us", "predicted_low_us", "predicted_high_us")
            of_y = _reach(of, "time_us", "low_us", "high_us")
            axes.errorbar(of["predicted_us"], of["time_us"], xerr=of_x, yerr=of_y, linestyle="", label=label,
                          **style)  # fmt: skip
        both = known[["time_us", "predicted_us"]].astype(float)
        ends = [both.min().min(), both.max().max()]
        axes.plot(ends, ends, color="0.5", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="predicted, µs", ylabel="measured, µs")
        _ticks(axes.xaxis)
        _ticks(axes.yaxis)
        _legend(figure, width)
    return figure


#: Name on the command line -> figure; each gives None where the frame has nothing for it.
FIGURES: dict[str, Callable[[pandas.DataFrame, float], Figure | None]] = {
    "time": time,
    "relative": relative,
    "scaling": scaling,
    "predicted": predicted,
}


def content(figure: Figure, form: str) -> bytes:
    """The bytes of a file of it, the same whenever it is drawn."""
    stream = io.BytesIO()
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[form]
    with matplotlib.rc_context(_STYLE):
        figure.savefig(stream, format=form, dpi=200, metadata=metadata)
    return stream.getvalue()


def inches(text: str) -> float:
    """3.3in, 84mm or 8.4cm. Raises `ArgumentError`."""
    units = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4}
    try:
        width = float(text[:-2]) * units[text[-2:]]
    except (KeyError, ValueError):
        width = 0.0
    if not 2 <= width <= 40:
        raise ArgumentError(f"{text!r:.20}: give 2in to 40in, such as 3.3in or 84mm")
    return width


def _sized(frame: pandas.DataFrame) -> pandas.DataFrame:
    reduces = frame["what"] == "reduce"
    found = frame.assign(x=frame["bytes"].where(reduces, frame["tokens"]))
    found["unit"] = reduces.map({True: "bytes", False: "tokens"})
    found["panel"] = [_words(row, _ranks(row["nodes"])) for _, row in frame.iterrows()]
    return found


def _ranks(nodes: Sequence[int]) -> str:
    """Where they are: of each, the node."""
    several = f" on {len(set(nodes))} nodes" if len(set(nodes)) > 1 else ""
    return f"{len(nodes)} ranks{several}{'' if list(nodes) == sorted(nodes) else ', cyclic'}"


def _words(row: Any, own: str) -> str:
    """A panel's title: what all of its points have."""
    words = [row["what"], own]
    if row["what"] == "decode":
        words.append(f"{row['heads']} heads ({row['kv_heads']} KV) x {row['head_dim']}")
    if row["batch"] * row["queries"] > 1:
        words.append(f"batch {row['batch']}, {row['queries']} queries")
    of_library = settings(row) and f", {settings(row)}"
    return f"{', '.join(words)}, {row['dtype']}\n{row['processor']}, {str(row['commit'])[:7]}{of_library}"


def _panels(
    frame: pandas.DataFrame, width: float, value: str, low: str, high: str, name: str
) -> Figure | None:
    """One panel below the other: lines over x, or, where it has one value, a row for each scheme."""
    if frame.empty:
        return None
    panels = list(frame.groupby("panel", sort=False))
    rows = [len(of) if of["x"].nunique() == 1 else 0 for _, of in panels]
    names = frame["label"].nunique()
    least = max(0.55 * width, 0.7 + 0.15 * names) if width >= _COLUMN else 1.8  # room beside or below it
    heights = [0.9 + 0.16 * many if many else least for many in rows]
    below = 0.0 if all(rows) or width >= _COLUMN else 0.08 * (names + 1)
    styles = dict(_styles(frame))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, sum(heights) + 0.3 + below))
        grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for (title, of), many, axes in zip(panels, rows, grid[:, 0], strict=True):
            axes.set_title(title, fontsize="medium", loc="left")
            if many:
                of = of.sort_values(value, ascending=False)
                for at, label in enumerate(of["label"]):
                    one = of.iloc[[at]]
                    axes.errorbar(one[value], [at], xerr=_reach(one, value, low, high), **styles[label])
                axes.set_yticks(range(many), of["label"])
                axes.set(xscale="log", xlabel=f"{name} ({of['x'].iloc[0]:,} {of['unit'].iloc[0]})")
                _ticks(axes.xaxis)
            else:
                for at, label in enumerate(of["label"].unique()):
                    line = of[of["label"] == label].sort_values("x")
                    aside = 1.2 ** ((at + 0.5) / names - 0.5)  # lest intervals lie on one another
                    axes.errorbar(aside * line["x"], line[value], yerr=_reach(line, value, low, high),
                                  label=label, **styles[label])  # fmt: skip
                axes.set(xscale="log", yscale="log", xlabel=of["unit"].iloc[0], ylabel=name)
                axes.set_xticks(sorted(of["x"].unique()), [f"{x:,}" for x in sorted(of["x"].unique())])
                axes.minorticks_off()
                _ticks(axes.yaxis)
            if value == "ratio":
                (axes.axvline if many else axes.axhline)(1, color="0.5", linewidth=0.8)
        if not all(rows):
            _legend(figure, width)
    return figure


def _reach(frame: pandas.DataFrame, value: str, low: str, high: str) -> Any:
    """Down and up from a value to the ends of its interval, 0 where it has none."""
    below, above = frame[value] - frame[low], frame[high] - frame[value]
    return [below.astype(float).fillna(0).clip(0), above.astype(float).fillna(0).clip(0)]


def _styles(frame: pandas.DataFrame) -> list[tuple[str, dict[str, Any]]]:
    """A mark and colour for each scheme that no other has: larger and black for schedules of one's own."""
    own = set(frame.loc[frame["schedule"].notna(), "label"])
    known, others = itertools.product(_MARKERS, _COLOURS), itertools.product(_OWN_MARKERS, ("black",))
    found = []
    for label in sorted(frame["label"].unique()):
        marker, colour = next(others if label in own else known)
        size, above = (5, 3) if label in own else (3, 2)
        look = {"marker": marker, "color": colour, "markersize": size, "zorder": above}
        found.append((label, {**look, "linewidth": 1, "elinewidth": 0.8, "capsize": 2.5}))
    return found


def _ticks(axis: Any) -> None:
    """Plain numbers, with 2 and 5 between powers of ten."""
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _legend(figure: Figure, width: float) -> None:
    """One for all panels: beside them, or below them in a figure as narrow as a column."""
    known = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    at: dict[str, Any] = {"loc": "outside lower center", "ncols": 2}
    if width >= _COLUMN:
        at = {"loc": "outside right center", "ncols": 1}
    figure.legend(known.values(), known.keys(), frameon=False, **at)
