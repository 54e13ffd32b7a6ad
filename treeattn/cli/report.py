"""``treeattn report``: results as one HTML file for a reader without this program, which needs no network:
text, tables that sort, pictures."""

from __future__ import annotations

import base64
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import click

from treeattn.cli import compare_table
from treeattn.cli.options import FILE, Output, output_options
from treeattn.cli.scheme import build, from_file
from treeattn.collectives import Schedule
from treeattn.collectives.drawings import text as draw_schedule
from treeattn.collectives.parameters import Groups
from treeattn.errors import ArgumentError, RestrictionError, TreeattnError
from treeattn.launch import EMULATED
from treeattn.report import Column, Report, Row
from treeattn.study import plot
from treeattn.study.compare.results import Results, Summary
from treeattn.study.compare.schema import NULL, SUM, Rank, Run
from treeattn.study.figures import draw
from treeattn.study.figures.cases import Study

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; padding: 0 1em; max-width: 75em; }
table { border-collapse: collapse; font-size: 13px; } .wide { overflow-x: auto; }
th, td { padding: .2em .7em; text-align: right; white-space: pre; border-bottom: 1px solid #8884; }
.words { text-align: left; } th { cursor: pointer; vertical-align: bottom; }
.red { color: #c33; } .dim { opacity: .75; }
pre { overflow-x: auto; } img { max-width: 100%; }
"""
# A click on a heading sorts by it, a second one the other way; "12,345" and "1.2 to 3.4" are numbers by their
# beginning, and a dash is last.
_SCRIPT = """
for (const head of document.querySelectorAll("th")) head.onclick = () => {
  const body = head.closest("table").tBodies[0], at = head.cellIndex;
  const up = head.dataset.up = +!+head.dataset.up;
  const key = row => { const text = row.cells[at].textContent, number = parseFloat(text.replaceAll(",", ""));
    return text === "-" ? [2, 0] : isNaN(number) ? [1, text] : [0, number]; };
  const less = (a, b) => a[0] - b[0] || (a[1] > b[1]) - (a[1] < b[1]);
  const rows = [...body.rows].sort((a, b) => less(key(a), key(b)));
  body.append(...(up ? rows : rows.reverse()));
};
"""


@dataclass(slots=True)
class Page(Report):
    """What is added to it becomes HTML, every column of tables among it."""

    title: str = "treeattn"
    _body: list[str] = field(default_factory=list)

    def heading(self, text: str, level: int = 2) -> None:
        """Add a heading."""
        self._body.append(f"<h{level}>{escape(text)}</h{level}>")

    def line(self, text: str = "", style: str | None = None) -> None:
        """Add a paragraph, without a terminal's empty lines before it."""
        if text.strip():
            self._body.append(f'<p class="{escape(style or "")}">{escape(text.strip())}</p>')

    def text(self, text: str) -> None:
        """Add lines as they are."""
        self._body.append(f"<pre>{escape(text)}</pre>")

    def folded(self, title: str, text: str) -> None:
        """Add lines that are shown by a click."""
        self._body.append(f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>")

    def picture(self, svg: bytes, what: str) -> None:
        """Add an SVG file as an image: its ids and styles stay its own."""
        data = base64.b64encode(svg).decode()
        self._body.append(f'<p><img alt="{escape(what)}" src="data:image/svg+xml;base64,{data}"></p>')

    def table(
        self,
        rows: Iterable[Row],
        columns: Iterable[Column[Row]],
        style: Callable[[Row], str] = lambda _: "",
    ) -> None:
        """Add a table that sorts by each of its columns."""
        kept = list(columns)
        sides = ["words" if column.words else "" for column in kept]
        head = "".join(f'<th class="{s}">{escape(c.heading)}</th>' for s, c in zip(sides, kept, strict=True))
        lines = []
        for row in rows:
            cells = [f'<td class="{s}">{escape(c.cell(row))}</td>' for s, c in zip(sides, kept, strict=True)]
            lines.append(f'<tr class="{escape(style(row))}">{"".join(cells)}</tr>')
        body = "\n".join(lines)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        self._body.append(f'<div class="wide">{table}</div>')

    def html(self) -> bytes:
        """The file."""
        parts = [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(self.title)}</h1>",
            *self._body,
            f"<script>{_SCRIPT}</script></body></html>\n",
        ]
        return "\n".join(parts).encode()


_METHOD = """
A block plans its scheme anew, warms it up and times iterations between agreed instants on one clock; each
repetition takes the schemes of a case in a new random order. Times are medians over iterations, blocks
weighing the same, with 95 % intervals from how blocks differ. Answers are ratios within repetitions (Hodges
and Lehmann) with Wilcoxon's p corrected by Holm. A click on a heading sorts a table.
"""


@click.command("report")
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="RESULTS..")
@click.option("--schedule", "schedules", multiple=True, metavar="FILE",
              help="A schedule of one's own among the results, to be drawn; again for several.")  # fmt: skip
@click.option("--title", default="Reductions compared")
@click.option("--baseline", metavar="S", help="Of answers and relative times.  [the library's sum]")
@output_options("The page.", "FILE.html", wide=False, json=None)
def command(
    files: tuple[Path, ...], schedules: tuple[str, ...], title: str, baseline: str | None, output: Output
) -> int:
    """Write results of `treeattn compare --out` as one HTML file that needs no network and no MPI.

    It holds the machines, the method, all tables (sortable), the answers, predicted against measured, figures
    where matplotlib is there, the schedules as drawings and as steps, and the commands that reproduce it.
    Exit code 1: a line could not be read, or a result is wrong; the rest is written.
    """
    os.environ["MPLBACKEND"] = "agg"
    output.open(*files)
    study, problems = plot.read(files)
    if not study.summaries:
        raise ArgumentError("these files hold no results of treeattn compare --out")
    study.baseline = plot.choose_baseline(study, baseline)
    own = {schedule.name: schedule for schedule in map(from_file, schedules)}
    page = Page({}, title=title)
    for problem in problems:
        click.echo(f"treeattn: warning: {problem}", err=True)
        page.line(f"warning: {problem}", "red")
    _machines(page, study.results)
    page.heading("Method")
    page.line(" ".join(_METHOD.split()))
    right = _tables(page, study, baseline)
    _figures(page, study)
    _schedules(page, study, own)
    _commands(page, study.results, files, schedules, baseline)
    output.write(page.html())
    click.echo(f"the report is in {output.out}")
    return 0 if right and not problems else 1


def _machines(page: Page, found: Results) -> None:
    page.heading("Machines")
    page.table(found.runs.values(), [
        Column("run", words=True),
        Column("started", words=True),
        Column("ranks", lambda run: len(run.ranks)),
        Column("nodes", lambda run: len({rank.node for rank in run.ranks})),
        Column("processors", lambda run: _each(rank.gpu or rank.cpu for rank in run.ranks), words=True),
        Column("hosts", lambda run: _each(rank.host for rank in run.ranks), words=True),
        Column("MPI", lambda run: " ".join(run.software.mpi.split()), words=True),
        Column("commit", lambda run: run.software.git, words=True),
        Column("packages", lambda run: _pairs(run.software.packages), words=True),
        Column("environment", lambda run: _pairs(run.environment), words=True),
    ])  # fmt: skip


def _each(names: Iterable[str | None]) -> str:
    return ", ".join(dict.fromkeys(map(str, names)))


def _pairs(found: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name}={value}" for name, value in found.items())


def _tables(page: Page, study: Study, baseline: str | None) -> bool:
    """The tables of compare, version by version; whether every result is right."""
    right, found = True, study.results
    for version in dict.fromkeys(summary.version for summary in study.summaries):
        of_version = [summary for summary in study.summaries if summary.version == version]
        cases: dict[object, list[Summary]] = {}
        for summary in of_version:
            cases.setdefault(summary.key.case, []).append(summary)
        for rows in cases.values():
            compare_table.answer(rows, found, baseline)
        used = {point.run for point in found.points if found.version(point) == version}
        errors = {error.key: error.message for error in found.errors if error.run in used}
        page.heading(f"Measured: {version}")
        in_order = [summary for rows in cases.values() for summary in rows]
        right &= compare_table.show(page, found.runs[max(used)], in_order, errors)
    return right


def _figures(page: Page, study: Study) -> None:
    page.heading("Figures")
    if why := draw.problem():
        page.line(why)
        return
    for figure in plot.FIGURES.values():
        for chart in figure.charts(study):
            page.picture(draw.render(chart, ("svg",))["svg"], f"{chart.title}; {chart.case}")


def _schedules(page: Page, study: Study, own: dict[str, Schedule]) -> None:
    page.heading("Schedules")
    drawn = dict.fromkeys(
        (point.key.scheme, point.key.ranks, _nodes(study.results.runs[point.run].used(point.key.place)))
        for point in study.results.points
        if point.key.scheme not in (NULL, SUM)
    )
    for scheme, ranks, nodes in drawn:
        try:
            schedule = own[scheme] if scheme in own else build(scheme, ranks, nodes)
            picture = draw_schedule.svg(schedule, nodes).encode()
        except RestrictionError as error:
            page.line(f"{scheme}: {error}")
        except TreeattnError:
            why = (
                "a schedule of one's own: give its file with --schedule"
                if "@" in scheme
                else "has no schedule"
            )
            page.line(f"{scheme}: {why}")
        else:
            page.picture(picture, f"{scheme} on {ranks} ranks")
            page.folded(f"{scheme} on {ranks} ranks, step by step", draw_schedule.text(schedule, nodes))


def _nodes(ranks: Sequence[Rank]) -> Groups:
    found: dict[int, list[int]] = {}
    for number, rank in enumerate(ranks):
        found.setdefault(rank.node, []).append(number)
    return tuple(map(tuple, found.values()))


def _commands(
    page: Page, found: Results, files: Sequence[Path], schedules: Sequence[str], baseline: str | None
) -> None:
    page.heading("To reproduce")
    lines = [
        f"{_emulated(run)}mpiexec -n {len(run.ranks)} "
        f"{shlex.join(run.software.command or ['treeattn', 'compare'])}"
        f"  # at commit {run.software.git}"
        for run in found.runs.values()
    ]
    again = ["treeattn", "report", *(path.name for path in files)]
    again += [word for path in schedules for word in ("--schedule", Path(path).name)]
    again += ["--baseline", baseline] if baseline else []
    page.text("\n".join([*dict.fromkeys(lines), f"{shlex.join(again)} --out report.html"]))


def _emulated(run: Run) -> str:
    """What made the nodes, where they are emulated."""
    made_by = run.environment.get(EMULATED)
    return f"jobs/emulated_cluster {made_by} -- " if made_by else ""
