"""Draws charts with matplotlib: to memory, without a screen, the same bytes from the same data."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from treeattn.errors import BackendError
from treeattn.study.figures import pictures
from treeattn.study.figures.chart import Chart, Curves, Lines, Rows
from treeattn.study.figures.style import DARK, INK, PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Formats of files.
FORMATS = ("png", "svg", "pdf")

#: Kind of chart -> its height, and what fills a figure with it.
_DRAWN_BY: dict[type[Chart], tuple[Any, Any]] = {
    Rows: (pictures.rows_height, pictures.draw_rows),
    Lines: (pictures.lines_height, pictures.draw_lines),
    Curves: (pictures.curves_height, pictures.draw_curves),
}

#: Inches: 720 pixels of a page.
WIDTH = 7.5

_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that labels fit wherever they are drawn
    "font.size": 8,
    "text.parse_math": False,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor"), PAPER),
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "savefig.dpi": 150,
    "pdf.fonttype": 42,  # outlines as publishers ask for them
    "svg.hashsalt": "treeattn",  # else ids in the file are random
}

# Plain rules, no CSS variables: many renderers of SVG files do not know them.
_COLOURS = f"""<style>
svg {{ color: {INK}; }} .paper {{ fill: {PAPER}; }}
@media screen and (prefers-color-scheme: dark) {{ svg {{ color: {DARK[0]}; }} .paper {{ fill: {DARK[1]}; }} }}
</style>
"""


def problem() -> str | None:
    """Why nothing can be drawn here, with the remedy; None if all is well."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"figures need matplotlib ({error}): pip install 'treeattn[plot]'"
    return None


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Ours alone, whatever the user's matplotlibrc says."""
    if why := problem():
        raise BackendError(why)
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        parameters: Any = matplotlib.rcParams
        parameters.update(_SETTINGS)
        yield


def render(
    chart: Chart, formats: tuple[str, ...] = FORMATS, width: float = WIDTH, titled: bool = True
) -> dict[str, bytes]:
    """Format -> the bytes of the file, of `draw`. Raises `BackendError` without matplotlib."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # not its tidings of where it caches fonts
    metadata = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None, "Title": chart.title},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None, "Title": chart.title},
    }
    with _settings():
        drawn, files = draw(chart, width, titled), {}
        for form in formats:
            stream = io.BytesIO()
            drawn.savefig(stream, format=form, metadata=metadata[form])
            files[form] = _in_both_modes(stream.getvalue()) if form == "svg" else stream.getvalue()
    return files


def _in_both_modes(svg: bytes) -> bytes:
    """Ink and paper follow the reader's screen: light unless it asks for dark."""
    text = svg.decode().replace(INK, "currentColor")
    text = re.sub(rf'style="fill: {PAPER};? ?', 'class="paper" style="', text)
    return text.replace("<defs>", _COLOURS + "<defs>", 1).encode()


def draw(chart: Chart, width: float = WIDTH, titled: bool = True) -> Figure:
    """The chart as a matplotlib figure, so many inches wide; without title and notes unless it is `titled`.
    Raises `BackendError` without matplotlib."""
    with _settings():
        from matplotlib.figure import Figure

        share = width / WIDTH
        title = [line for text in (chart.title, chart.case) for line in textwrap.wrap(text, int(118 * share))]
        notes = [line for note in chart.notes for line in textwrap.wrap(note, int(142 * share))]
        height, fill = _DRAWN_BY[type(chart)]
        if not titled:
            figure = Figure(figsize=(width, height(chart, share)), layout="constrained")
            fill(figure, chart, share)
            return figure
        heights = [height(chart, share) + 0.16 * len(title), 0.13 * len(notes) + 0.1]
        figure = Figure(figsize=(width, sum(heights)), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=heights)
        picture, below = parts
        fill(picture, chart, share)
        picture.suptitle("\n".join(title), x=0.01, ha="left", fontsize=8.5)
        below.text(0.01, 0.98, "\n".join(notes), va="top", fontsize=6.5, alpha=0.75)
        return figure
