"""``treeattn report``: results as one HTML file for a reader without this program, which needs no network."""

from __future__ import annotations

import base64
import functools
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from treeattn.cli import compare_table, plot
from treeattn.cli.options import CLUSTER, FILE, Output, output_options
from treeattn.cli.scheme import build
from treeattn.collectives import Schedule
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.critical_path import critical_path, in_words
from treeattn.collectives.clusters.placement import node_groups
from treeattn.collectives.clusters.simulate import Simulation, simulate
from treeattn.collectives.drawings import svg, text, timeline
from treeattn.collectives.schedule import Payload
from treeattn.errors import ArgumentError, RestrictionError, ScheduleError
from treeattn.mpi import topology
from treeattn.report import Progress
from treeattn.study import extra
from treeattn.study.compare import rows
from treeattn.study.compare.rows import Row
from treeattn.study.compare.summary import Summary
from treeattn.study.why import equal_messages

#: Of critical paths where no cluster is named: who waits for whom hangs little on them.
_PRICES = "cpu-hdr200"

_Simulated = Callable[..., Simulation | None]


@click.command("report")
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="RESULTS..")
@click.option("--baseline", metavar="S", help="Of ratios and verdicts.  [the library's sum]")
@CLUSTER
@output_options("The page.", "FILE.html", json=None)
def command(files: tuple[Path, ...], baseline: str | None, cluster: str | None, output: Output) -> int:
    """Write results of `treeattn compare --out` as one HTML file that needs no network and no MPI.

    It holds what was fastest and why, the machines, the method, all tables, figures, the schedules drawn with
    their critical path and as steps, and the commands that reproduce it. Exit code 1: a result is wrong.
    Critical paths are simulated with the prices of --cluster, else of cpu-hdr200. pip install '.[study]'.
    """
    draw, named = plot.figures(), topology.described(cluster)
    output.open(*files)
    click.get_current_context().with_resource(Progress())("drawing the report")
    frame, found = plot.frame(files, baseline), rows.read(*files)
    summaries: Any = frame.astype(object).where(frame.notna(), None).to_dict("records")

    @functools.cache  # a schedule is drawn over time, and by rounds
    def simulated(*of: Any) -> Simulation | None:
        return _simulated(named, *of)

    cases = [
        _case(list(group), simulated)
        for _, group in groupby(summaries, lambda row: (row["case"], row["commit"], row["mpi"], row["nodes"]))
    ]
    made = {name: figure(frame, 9.0) for name, figure in draw.FIGURES.items()}
    page = extra("jinja2").Environment(
        loader=extra("jinja2").PackageLoader("treeattn.study", "."), autoescape=True, trim_blocks=True
    )
    names = (path.name if path.is_absolute() else str(path) for path in files)
    again = ["treeattn", "report", *names, "--out", "report.html"]
    again += ["--cluster", cluster or os.environ[topology.PRESET]] if named else []
    again += ["--baseline", baseline] if baseline else []
    written = page.get_template("report.html").render(
        cases=cases,
        jobs=list(_jobs(found)),
        errors=dict.fromkeys(f"{row.label} ({row.words}): {row.error}" for row in found if row.error),
        figures={
            name: _encoded(draw.content(figure, "svg")) for name, figure in made.items() if figure is not None
        },
        schedules=list(_schedules(found, simulated)),
        commands=[*dict.fromkeys(map(_command, found)), shlex.join(again)],
    )
    output.write(written.encode())
    click.echo(f"the report is in {output.out}")
    return 1 if any(row["wrong"] for row in summaries) else 0


def _encoded(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def _case(of: list[Summary], simulated: _Simulated) -> dict[str, Any]:
    """The table of one case, of the columns that have something, and what it says and shows."""
    columns = [
        column for column in compare_table.COLUMNS if any(column.cell(row) not in ("-", "") for row in of)
    ]
    return {
        "title": of[0]["case"],
        "machine": f"{of[0]['processor']}, {of[0]['mpi']}, commit {of[0]['commit']}",
        "columns": [column for column in columns if not column.wide],
        "more": [columns[0], *(column for column in columns if column.wide)],
        "rows": of,
        "why": list(_over_time(of, simulated)),
        "headline": compare_table.sentence(of),
        "notes": [*filter(None, (equal_messages(of), compare_table.own_jobs(of)))],
    }


def _jobs(found: Iterable[Row]) -> Iterator[dict[str, Any]]:
    for row in {row.run: row for row in found}.values():
        variables = ", ".join(f"{name}={value}" for name, value in row.environment.items())
        yield {
            "run": row.run, "started": row.started, "ranks": row.ranks, "nodes": len(set(row.nodes)),
            "hosts": row.hosts, "processor": row.processor, "MPI": row.mpi, "treeattn": row.treeattn or "",
            "commit": row.commit, "environment": variables, "warning": row.warning or "",
        }  # fmt: skip


def _over_time(of: list[Summary], simulated: _Simulated) -> Iterator[dict[str, str]]:
    """The fastest that has a schedule over time, and on its scale the first that is slower."""
    found: dict[bool, Simulation] = {}
    try:
        for row in of if of[0]["ranks"] > 1 else ():
            slower = bool(found) and row["like_fastest"] is False
            if slower not in found and (simulation := simulated(*_step(row))) is not None:
                found[slower] = simulation
    except ArgumentError as error:  # of the case, and so of its first
        yield {"words": f"not drawn: {error}", "picture": ""}
    for one in found.values():
        try:
            picture = timeline.timeline(one, max(each.time for each in found.values()))
        except RestrictionError as error:
            yield {"words": str(error), "picture": ""}
            continue
        words = f"{one.schedule.name}, simulated on {one.cluster.about}, {in_words(critical_path(one))}"
        yield {"words": words, "picture": _encoded(picture.encode())}


def _step(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What `_simulated` needs to know of a row."""
    records = row["batch"] * row["heads"] * row["queries"]
    payload = Payload(records, row["bytes"] // records, row["queries"])
    return row["scheme"], row["schedule"], tuple(row["nodes"]), payload


def _simulated(
    named: topology.Described | None, scheme: str, own: str | None, nodes: tuple[int, ...], payload: Payload
) -> Simulation | None:
    """A step of what was measured, with prices of the named cluster; None for what has no schedule: a
    library's collective, a ring, one that this size does not have. Without a cluster, with `_PRICES` for
    nodes as the ranks had them. Raises `ArgumentError` for more ranks than the cluster has places, or than
    are drawn."""
    if len(nodes) > svg.RANK_LIMIT:
        raise ArgumentError(f"{len(nodes)} ranks are more than {svg.RANK_LIMIT}")
    places = topology.Topology(tuple(topology.Rank(rank, node, ()) for rank, node in enumerate(nodes)))
    try:
        schedule = Schedule.from_json(own) if own else build(scheme, len(nodes), places.nodes)
    except ScheduleError:
        return None
    cluster = named.cluster if named else _like(places)
    return simulate(schedule, cluster, places.places_on(cluster), payload)


def _like(places: topology.Topology) -> description.Cluster:
    """A cluster of such nodes by prices of another."""
    known = description.load(_PRICES)
    joins, sizes = (max(map(len, places.nodes)), len(places.nodes)), set(map(len, places.nodes))
    ranks = f"{joins[1]} x {joins[0]}" if len(sizes) == 1 else " + ".join(str(len(n)) for n in places.nodes)
    tiers = [structs.replace(tier, joins=count) for tier, count in zip(known.tiers, joins, strict=False)]
    return structs.replace(
        known,
        about=f"{ranks} ranks with the prices of {_PRICES} (--cluster names another machine)",
        tiers=tuple(tiers),
    )


def _schedules(found: Iterable[Row], simulated: _Simulated) -> Iterator[dict[str, str]]:
    """Drawings of those that were measured, own ones out of their rows, with their critical paths; or why
    there is none."""
    for row in {
        (row.scheme, tuple(row.nodes)): row for row in found if row.algorithm is None and row.ranks > 1
    }.values():
        made = {"title": f"{row.scheme} on {row.ranks} ranks"}
        try:
            if (one := simulated(*_step(structs.asdict(row)))) is None:
                continue
            made["picture"] = _encoded(timeline.rounds(one).encode())
            made["steps"] = text.text(one.schedule, node_groups(one.cluster, one.places))
        except (ArgumentError, RestrictionError) as error:
            made["words"] = f"not drawn: {error}"
        yield made


def _command(row: Row) -> str:
    """The command of its run, and what made the nodes where they are emulated."""
    made_by = row.environment.get("TREEATTN_EMULATED")
    emulated = f"jobs/emulated_cluster {made_by} -- " if made_by else ""
    return f"{emulated}mpiexec -n {len(row.nodes)} {row.command}  # at commit {row.commit}"
