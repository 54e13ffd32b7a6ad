"""``treeattn report``: results as one HTML file for a reader without this program, which needs no network."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from treeattn.cli import compare_table, plot
from treeattn.cli.options import FILE, Output, output_options
from treeattn.cli.scheme import build
from treeattn.collectives import Schedule
from treeattn.collectives.drawings import text as draw_schedule
from treeattn.errors import ScheduleError
from treeattn.study import extra
from treeattn.study.compare import rows
from treeattn.study.compare.rows import Row
from treeattn.study.compare.summary import Summary
from treeattn.study.why import equal_messages


@click.command("report")
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="RESULTS..")
@click.option("--title", default="Reductions compared")
@click.option("--baseline", metavar="S", help="Of ratios and verdicts.  [the library's sum]")
@output_options("The page.", "FILE.html", wide=False, json=None)
def command(files: tuple[Path, ...], title: str, baseline: str | None, output: Output) -> int:
    """Write results of `treeattn compare --out` as one HTML file that needs no network and no MPI.

    It holds what was fastest, the machines, the method, all tables, figures, the schedules as drawings and as
    steps, and the commands that reproduce it. Exit code 1: a result is wrong. pip install '.[study]'.
    """
    draw = plot.figures()
    output.open(*files)
    frame, found = plot.frame(files, baseline), rows.read(*files)
    summaries: Any = frame.astype(object).where(frame.notna(), None).to_dict("records")
    cases = [
        _case(list(group))
        for _, group in groupby(summaries, lambda row: (row["case"], row["commit"], row["mpi"], row["nodes"]))
    ]
    made = {name: figure(frame, 9.0) for name, figure in draw.FIGURES.items()}
    page = extra("jinja2").Environment(
        loader=extra("jinja2").PackageLoader("treeattn.study", "."), autoescape=True, trim_blocks=True
    )
    again = [
        "treeattn",
        "report",
        *(path.name if path.is_absolute() else str(path) for path in files),
        "--out",
        "report.html",
    ]
    again += ["--baseline", baseline] if baseline else []
    text = page.get_template("report.html").render(
        title=title,
        cases=cases,
        jobs=list(_jobs(found)),
        errors=dict.fromkeys(f"{row.label} ({row.words}): {row.error}" for row in found if row.error),
        figures={
            name: _encoded(draw.content(figure, "svg")) for name, figure in made.items() if figure is not None
        },
        schedules=list(_schedules(found)),
        commands=[*dict.fromkeys(map(_command, found)), shlex.join(again)],
    )
    output.write(text.encode())
    click.echo(f"the report is in {output.out}")
    return 1 if any(row["wrong"] for row in summaries) else 0


def _encoded(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def _case(of: list[Summary]) -> dict[str, Any]:
    """The table of one case, of the columns that have something, and what it says."""
    columns = [
        column for column in compare_table.COLUMNS if any(column.cell(row) not in ("-", "") for row in of)
    ]
    return {
        "title": of[0]["case"],
        "machine": f"{of[0]['processor']}, {of[0]['mpi']}, commit {of[0]['commit']}",
        "columns": columns,
        "rows": of,
        "headline": compare_table.sentence(of),
        "notes": [*filter(None, (equal_messages(of), compare_table.own_jobs(of)))],
    }


def _jobs(found: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """What each run says of itself."""
    for row in {row.run: row for row in found}.values():
        variables = ", ".join(f"{name}={value}" for name, value in row.environment.items())
        yield {
            "run": row.run, "started": row.started, "ranks": row.ranks, "nodes": len(set(row.nodes)),
            "hosts": row.hosts, "processor": row.processor, "MPI": row.mpi, "treeattn": row.treeattn,
            "commit": row.commit, "environment": variables, "warning": row.warning or "",
        }  # fmt: skip


def _schedules(found: Iterable[Row]) -> Iterator[dict[str, str]]:
    """Drawings of those that were measured, own ones out of their rows."""
    for row in {(row.scheme, tuple(row.nodes)): row for row in found if row.algorithm is None}.values():
        names, own = sorted(set(row.nodes)), row.schedule
        nodes = [[rank for rank, on in enumerate(row.nodes) if on == node] for node in names]
        try:
            schedule = Schedule.from_json(own) if own else build(row.scheme, row.ranks, nodes)
            picture = draw_schedule.svg(schedule, nodes).encode()
        except ScheduleError:  # a library's collective, a ring, or one that this size does not have
            continue
        yield {
            "title": f"{row.scheme} on {row.ranks} ranks",
            "picture": _encoded(picture),
            "steps": draw_schedule.text(schedule, nodes),
        }


def _command(row: Row) -> str:
    """The command of its run, and what made the nodes where they are emulated."""
    made_by = row.environment.get("TREEATTN_EMULATED")
    emulated = f"jobs/emulated_cluster {made_by} -- " if made_by else ""
    return f"{emulated}mpiexec -n {len(row.nodes)} {row.command}  # at commit {row.commit}"
