"""Draws charts with matplotlib: to memory, without a screen, the same bytes from the same data."""

from __future__ import annotations

import contextlib
import io
import logging
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from treeattn.errors import BackendError
from treeattn.study.figures import lines, rows
from treeattn.study.figures.chart import Chart, Lines
from treeattn.study.figures.style import Style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "draw", "problem", "render"]

#: Formats of files.
FORMATS = ("png", "svg")

_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that labels fit wherever they are drawn
    "font.size": 9,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.3,
    "lines.markersize": 5,
    "savefig.dpi": 150,
    "svg.hashsalt": "treeattn",  # else ids in the file are random
}


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
    why = problem()
    if why is not None:
        raise BackendError(why)
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        parameters: Any = matplotlib.rcParams
        parameters.update(_SETTINGS)
        yield


def render(chart: Chart, styles: Mapping[str, Style], formats: tuple[str, ...] = FORMATS) -> dict[str, bytes]:
    """Format -> the bytes of the file. Raises `BackendError` without matplotlib."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # not its tidings of where it caches fonts
    metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None, "Title": chart.title}}
    with _settings():
        drawn, files = draw(chart, styles), {}
        for form in formats:
            stream = io.BytesIO()
            drawn.savefig(stream, format=form, metadata=metadata[form])
            files[form] = stream.getvalue()
    return files


def draw(chart: Chart, styles: Mapping[str, Style]) -> Figure:
    """The chart as a matplotlib figure. styles: of every name in its `Series` or ``styles``.

    Raises `BackendError` without matplotlib.
    """
    with _settings():
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        if isinstance(chart, Lines):
            lines.draw(figure, chart, styles)
        else:
            rows.draw(figure, chart, styles)
        _write_around(figure, chart, float(figure.get_size_inches()[0]))
        return figure


def _write_around(figure: Figure, chart: Chart, width: float) -> None:
    """Title and case above, notes below; so many characters of each fit into an inch."""
    title = [*textwrap.wrap(chart.title, int(width * 10)), *textwrap.wrap(chart.case, int(width * 15))]
    figure.suptitle("\n".join(title), x=0.01, ha="left", fontsize=9)
    notes = [line for note in chart.notes for line in textwrap.wrap(note, int(width * 19))]
    figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=6.5, color="#4d4d4d")
