"""``treeattn simulate``: what schedules cost on a described cluster, without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from treeattn import collectives, files
from treeattn.cli.console import WIDE, Cell, console, count, microseconds, number, table
from treeattn.cli.scheme import from_file, is_file
from treeattn.collectives import Schedule
from treeattn.collectives.clusters import description, placement
from treeattn.collectives.clusters.critical_path import critical_path, in_words
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.placement import Placement
from treeattn.collectives.clusters.simulate import Payload, Simulation, simulate
from treeattn.collectives.drawings.timeline import timeline
from treeattn.collectives.drawings.trace import trace
from treeattn.decoder import auto
from treeattn.decoder.plan import select
from treeattn.errors import ArgumentError, RestrictionError, ScheduleError
from treeattn.study import environment
from treeattn.study.decode_step import DecodeStep, Shape, decode_step
from treeattn.topology import Described, described, unnamed

__all__ = ["command", "placed"]

_DRAWINGS: dict[str, Callable[[Simulation], str]] = {"svg": timeline, "trace": trace}
_SCHEMES = "recursive_doubling,k_nomial_tree,reduce_scatter_gather,hierarchical,split_rail"


class Row(NamedTuple):
    """A line of the table: a scheme under a placement, and what it costs."""

    scheme: str
    placement: str
    simulation: Simulation
    step: DecodeStep | None


@click.command("simulate")
@click.option(
    "--cluster",
    "cluster_name",
    metavar="NAME|FILE.toml",
    help="A shipped cluster, or a file of your own; default TREEATTN_CLUSTER.",
)
@click.option("--list", "listing", is_flag=True, help="Only name the shipped clusters.")
@click.option("--ranks", type=click.IntRange(1), help="Number of ranks; FILE.json says it itself.")
@click.option("--schemes", default=_SCHEMES, show_default=True, metavar="A,B,..|all",
              help="Schedules by name, or FILE.json.")  # fmt: skip
@click.option("--placement", "placements", default="block", show_default=True, metavar="A,B,..|0+8+1+9",
              help="block, cyclic, suited: where ranks sit: several, or the place of each rank.")  # fmt: skip
@click.option("--executor", help="Who runs the rounds; each cluster lists its own.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--queries", type=click.IntRange(1), default=1, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=16, show_default=True)
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True)
@click.option("--tokens", metavar="N", help="Whole decode steps over so many tokens, and the rings' too.")
@click.option("--kv-heads", type=click.IntRange(1), help="With --tokens.  [heads]")
@click.option("--format", "form", type=click.Choice(["table", *_DRAWINGS]), default="table",
              show_default=True, help="svg, trace (for ui.perfetto.dev): one scheme over time.")  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write the drawing here instead of to the screen."
)
@WIDE
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything that was found.")
def command(
    cluster_name: str | None,
    listing: bool,
    ranks: int | None,
    schemes: str,
    placements: str,
    executor: str | None,
    batch: int,
    queries: int,
    heads: int,
    head_dim: int,
    tokens: str | None,
    kv_heads: int | None,
    form: str,
    out: Path | None,
    wide: bool,
    json_path: Path | None,
) -> None:
    """Predict what a reduction costs on a cluster that need not be here, message by message. Needs no MPI."""
    if listing:
        _list()
        return
    named = described(cluster_name)
    if named is None:
        raise unnamed()
    ranks = ranks or _ranks_of(schemes)
    if ranks is None:
        raise ArgumentError(f"--ranks N: over how many of the {named.cluster.places} places?")
    if form == "table" and out is not None:
        raise ArgumentError("--out takes a drawing: add --format svg or --format trace, or write --json FILE")
    files.check_distinct([json_path, out])
    write_json, write = files.output_writer(json_path), files.output_writer(out)
    cluster = named.cluster
    payload = Payload(batch * heads * queries, 4 * (head_dim + 2), queries)
    shape = None
    if tokens is not None:
        shape = Shape(number("--tokens", tokens), heads, kv_heads or heads, head_dim, batch, queries)
        if heads % shape.kv_heads:
            raise ArgumentError(f"--kv-heads {kv_heads} does not divide --heads {heads}: give a divisor")
    elif kv_heads is not None:
        raise ArgumentError("--kv-heads says how large the cache is: give --tokens N too, or leave it out")
    rows = list(_rows(cluster, ranks, schemes, placements, payload, executor, shape))
    if form != "table":
        _draw(rows, form, out, write)
    else:
        _print(named, rows, wide, payload, shape)
    write_json(environment.as_json(_facts(named, ranks, payload, rows)))


def _ranks_of(schemes: str) -> int | None:
    """Of the first file among them."""
    paths = [name.strip() for name in schemes.split(",") if is_file(name.strip())]
    return from_file(paths[0]).size if paths else None


def _list() -> None:
    for name in description.shipped():
        cluster = description.load(name)
        executors = ", ".join(cluster.executors)
        print(f"{name:12} {cluster.places:>6} places  {cluster.about} (executors: {executors})")


def _rows(
    cluster: Cluster,
    ranks: int,
    schemes: str,
    placements: str,
    payload: Payload,
    executor: str | None,
    shape: Shape | None,
) -> Iterator[Row]:
    """Every scheme under every placement. Of all schemes, those that refuse this size are left out."""
    names = (
        collectives.names("schedule") if schemes == "all" else [name.strip() for name in schemes.split(",")]
    )
    for name in names:
        for where in placements.split(","):
            try:
                schedule, places = _placed(cluster, ranks, name, where.strip())
            except RestrictionError:
                if schemes != "all":
                    raise
                continue
            step = None if shape is None else decode_step(cluster, places, schedule, shape, executor)
            simulation = simulate(schedule, cluster, places, payload, executor)
            yield Row(schedule.name if is_file(name) else select(name).text, where, simulation, step)


def _placed(cluster: Cluster, ranks: int, name: str, where: str) -> tuple[Schedule, Placement]:
    if where == "suited":
        schedule = _schedule(name, ranks, placement.node_groups(cluster, placement.block(cluster, ranks)))
        return schedule, placement.suited(cluster, schedule)
    places = placed(cluster, ranks, where)
    return _schedule(name, ranks, placement.node_groups(cluster, places)), places


def placed(cluster: Cluster, ranks: int, where: str) -> Placement:
    """What an option says of places. Raises `ArgumentError`."""
    if where in placement.PLACEMENTS:
        return placement.PLACEMENTS[where](cluster, ranks)
    places = placement.explicit(cluster, _numbers(where))
    if len(places) != ranks:
        raise ArgumentError(
            f"--placement {where:.40}: {len(places)} places for {ranks} ranks; give one for each"
        )
    return places


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split("+")))
    except ValueError:
        known = ", ".join([*placement.PLACEMENTS, "suited"])
        raise ArgumentError(
            f"--placement {text!r:.40}: take {known}, or the place of each rank as 0+8+1+9"
        ) from None


def _schedule(name: str, ranks: int, nodes: Sequence[Sequence[int]]) -> Schedule:
    """Proved before it is priced."""
    if is_file(name):
        schedule = from_file(name, ranks, "--ranks says")
    else:
        selection = select(name)
        if selection.row is auto.ROW:
            raise ScheduleError(auto.NOT_NAMED)
        if selection.row.generator is None:
            known = ", ".join(collectives.names("schedule"))
            raise ScheduleError(f"{selection.text} has no schedule to simulate; take one of {known}")
        schedule = selection.build(ranks, nodes if selection.needs_nodes else None)
    collectives.check(schedule)
    return schedule


def _draw(rows: Sequence[Row], form: str, out: Path | None, write: Callable[[bytes], None]) -> None:
    if len(rows) != 1:
        raise ArgumentError(f"--format {form} draws one scheme under one placement, not {len(rows)}: name it")
    drawing = _DRAWINGS[form](rows[0].simulation)
    write(drawing.encode())
    print(
        f"{rows[0].scheme} on {rows[0].simulation.schedule.size} ranks over time is in {out}"
        if out
        else drawing
    )


def _print(named: Described, rows: Sequence[Row], wide: bool, payload: Payload, shape: Shape | None) -> None:
    screen = console(wide)
    ordered = sorted(rows, key=lambda row: row.simulation.time)
    size = rows[0].simulation.schedule.size
    screen.print(f"{size} ranks on {named.shown}; {payload.bytes:,} bytes each")
    columns: dict[str, Cell[Row]] = {"scheme": lambda row: row.scheme}
    if len({row.placement for row in rows}) > 1:
        columns |= {"placement": lambda row: row.placement}
    columns |= {
        "µs": lambda row: microseconds(row.simulation.time),
        "x floor": lambda row: _ratio(row.simulation),
        "messages": lambda row: count(_between(row.simulation, "messages")),
        "bytes": lambda row: count(_between(row.simulation, "bytes")),
        "card": lambda row: count(row.simulation.busiest_card),
    }
    if shape is not None:
        columns |= {"step, µs": lambda row: microseconds(row.step.time) if row.step else "-"}
    table(screen, columns, ordered, words=len(columns) - 5 - (shape is not None))
    screen.print("\nmessages and bytes: between nodes, of all ranks; of the card that sends most")
    screen.print(f"floor, what no scheme is faster than: {microseconds(ordered[0].simulation.bound)} µs")
    if shape is not None and ordered[0].step is not None:
        screen.print(ordered[0].step.in_words())
    screen.print(f"{ordered[0].scheme}: {in_words(critical_path(ordered[0].simulation))}")


def _ratio(simulation: Simulation) -> str:
    return f"{simulation.time / simulation.bound:.2f}" if simulation.bound else "-"


def _between(simulation: Simulation, what: str) -> int:
    outer = simulation.traffic[simulation.cluster.node_tier + 1 :]
    return sum(getattr(traffic, what) for traffic in outer)


def _facts(named: Described, ranks: int, payload: Payload, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "cluster": named.cluster.name,
        "named_by": named.by,
        "ranks": ranks,
        "bytes": payload.bytes,
        "rows": [_row_facts(row) for row in rows],
    }


def _row_facts(row: Row) -> dict[str, Any]:
    simulation = row.simulation
    path = critical_path(simulation)
    return {
        "scheme": row.scheme,
        "placement": row.placement,
        "microseconds": simulation.time,
        "floor_microseconds": simulation.bound,
        "tiers": [{"tier": t.tier, "messages": t.messages, "bytes": t.bytes} for t in simulation.traffic],
        "busiest_card_bytes": simulation.busiest_card,
        "critical_path": in_words(path),
        "segments": json.loads(json.dumps([segment._asdict() for segment in path])),
        "decode_step": None if row.step is None else row.step._asdict(),
    }
