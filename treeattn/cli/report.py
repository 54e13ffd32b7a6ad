"""``treeattn report``: results as one HTML file for a reader without this program, which needs no network."""

from __future__ import annotations

import base64
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
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
from treeattn.study import extra
from treeattn.study.compare import rows
from treeattn.study.compare.rows import Row
from treeattn.study.compare.summary import Summary
from treeattn.study.why import equal_messages

#: Of critical paths where no cluster is named: who waits for whom hangs little on them.
_PRICES = "cpu-hdr200"


@click.command("report")
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="RESULTS..")
@click.option("--baseline", metavar="S", help="Of ratios and verdicts.  [the library's sum]")
@CLUSTER
@output_options("The page.", "FILE.html", wide=False, json=None)
def command(files: tuple[Path, ...], baseline: str | None, cluster: str | None, output: Output) -> int:
    """Write results of `treeattn compare --out` as one HTML file that needs no network and no MPI.

    It holds what was fastest and why, the machines, the method, all tables, figures, the schedules drawn with
    their critical path and as steps, and the commands that reproduce it. Exit code 1: a result is wrong.
    Critical paths are simulated with the prices of --cluster, else of cpu-hdr200. pip install '.[study]'.
    """
    draw, named = plot.figures(), topology.described(cluster)
    output.open(*files)
    frame, found = plot.frame(files, baseline), rows.read(*files)
    summaries: Any = frame.astype(object).where(frame.notna(), None).to_dict("records")
    cases = [
        _case(list(group), named)
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
        *(["--cluster", cluster or os.environ[topology.PRESET]] if named else []),
    ]
    again += ["--baseline", baseline] if baseline else []
    written = page.get_template("report.html").render(
        cases=cases,
        jobs=list(_jobs(found)),
        errors=dict.fromkeys(f"{row.label} ({row.words}): {row.error}" for row in found if row.error),
        figures={
            name: _encoded(draw.content(figure, "svg")) for name, figure in made.items() if figure is not None
        },
        schedules=list(_schedules(found, named)),
        commands=[*dict.fromkeys(map(_command, found)), shlex.join(again)],
    )
    output.write(written.encode())
    click.echo(f"the report is in {output.out}")
    return 1 if any(row["wrong"] for row in summaries) else 0


def _encoded(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def _case(of: list[Summary], named: topology.Described | None) -> dict[str, Any]:
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
        "why": list(_over_time(of, named)),
        "headline": compare_table.sentence(of),
        "notes": [*filter(None, (equal_messages(of), compare_table.own_jobs(of)))],
    }


def _jobs(found: Iterable[Row]) -> Iterator[dict[str, Any]]:
    for row in {row.run: row for row in found}.values():
        variables = ", ".join(f"{name}={value}" for name, value in row.environment.items())
        yield {
            "run": row.run, "started": row.started, "ranks": row.ranks, "nodes": len(set(row.nodes)),
            "hosts": row.hosts, "processor": row.processor, "MPI": row.mpi, "treeattn": row.treeattn,
            "commit": row.commit, "environment": variables, "warning": row.warning or "",
        }  # fmt: skip


def _over_time(of: list[Summary], named: topology.Described | None) -> Iterator[dict[str, str]]:
    """The fastest that has a schedule over time, and on its scale the first that is slower."""
    found: dict[bool, Simulation] = {}
    try:
        for row in of if of[0]["ranks"] > 1 else ():
            slower = bool(found) and row["like_fastest"] is False
            if slower not in found and (simulation := _simulated(row, named)) is not None:
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


def _simulated(row: Mapping[str, Any], named: topology.Described | None) -> Simulation | None:
    """A step of what was measured, with prices of the named cluster; None for what has no schedule: a
    library's collective, a ring, one that this size does not have. Without a cluster, with `_PRICES` for
    nodes as the ranks had them. Raises `ArgumentError` for more ranks than the cluster has places, or than
    are drawn."""
    if row["ranks"] > svg.RANK_LIMIT:
        raise ArgumentError(f"{row['ranks']} ranks are more than {svg.RANK_LIMIT}")
    places = topology.Topology(tuple(topology.Rank(rank, node, ()) for rank, node in enumerate(row["nodes"])))
    try:
        own = row["schedule"]
        schedule = Schedule.from_json(own) if own else build(row["scheme"], row["ranks"], places.nodes)
    except ScheduleError:
        return None
    cluster = named.cluster if named else _like(places)
    records = row["batch"] * row["heads"] * row["queries"]
    return simulate(
        schedule,
        cluster,
        places.places_on(cluster),
        Payload(records, row["bytes"] // records, row["queries"]),
    )


def _like(places: topology.Topology) -> description.Cluster:
    """A cluster of such nodes by prices of another."""
    known = description.load(_PRICES)
    joins = max(map(len, places.nodes)), len(places.nodes)
    ranks = (
        f"{joins[1]} x {joins[0]}"
        if joins[0] * joins[1] == len(places.ranks)
        else " + ".join(str(len(node)) for node in places.nodes)
    )
    tiers = [structs.replace(tier, joins=count) for tier, count in zip(known.tiers, joins, strict=False)]
    return structs.replace(
        known,
        about=f"{ranks} ranks with the prices of {_PRICES} (--cluster names another machine)",
        tiers=tuple(tiers),
    )


def _schedules(found: Iterable[Row], named: topology.Described | None) -> Iterator[dict[str, str]]:
    """Drawings of those that were measured, own ones out of their rows, with their critical paths."""
    for row in {
        (row.scheme, tuple(row.nodes)): row for row in found if row.algorithm is None and row.ranks > 1
    }.values():
        try:
            if (one := _simulated(structs.asdict(row), named)) is None:
                continue
            picture = timeline.rounds(one).encode()
        except (ArgumentError, RestrictionError):
            continue
        yield {
            "title": f"{row.scheme} on {row.ranks} ranks",
            "picture": _encoded(picture),
            "steps": text.text(one.schedule, node_groups(one.cluster, one.places)),
        }


def _command(row: Row) -> str:
    """The command of its run, and what made the nodes where they are emulated."""
    made_by = row.environment.get("TREEATTN_EMULATED")
    emulated = f"jobs/emulated_cluster {made_by} -- " if made_by else ""
    return f"{emulated}mpiexec -n {len(row.nodes)} {row.command}  # at commit {row.commit}"
