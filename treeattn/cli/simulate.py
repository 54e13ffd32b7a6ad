"""``treeattn simulate``: what schedules cost on a described cluster, without it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import click

from treeattn import collectives
from treeattn.cli import options
from treeattn.cli.options import Output
from treeattn.cli.scheme import build, from_file, is_file
from treeattn.collectives import Schedule
from treeattn.collectives.catalog import with_result
from treeattn.collectives.clusters import placement
from treeattn.collectives.clusters.arrivals import TOGETHER, Arrivals, arrivals
from treeattn.collectives.clusters.critical_path import assumed_share, cost, critical_path, in_words
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.placement import Placement
from treeattn.collectives.clusters.simulate import Simulation, simulate
from treeattn.collectives.schedule import Payload, Result
from treeattn.errors import ArgumentError, RestrictionError
from treeattn.mpi.topology import needed
from treeattn.report import Column, Progress, Report, between, count, microseconds, ratio
from treeattn.selection import select
from treeattn.study import intervals
from treeattn.study.decode_step import StepShape, attention_cost, kv_ring_cost, query_ring_exchange
from treeattn.study.intervals import DRAWS, estimates
from treeattn.study.why import counts, headline

_SCHEMES = "recursive_doubling,k_nomial_tree,reduce_scatter_gather,hierarchical,split_rail"


@click.command("simulate")
@options.CLUSTER
@click.option("--ranks", type=options.RANKS, help="Number of ranks; FILE.json says it itself.")
@click.option("--schemes", default=_SCHEMES, metavar="A,B,..|all", help="Schedules by name, or FILE.json.")
@options.RESULT
@click.option("--placement", "placements", default="block", metavar="A,B,..|0+8+1+9",
              help="block, cyclic, suited: where ranks sit: several, or the place of each rank.")  # fmt: skip
@click.option("--executor", help="Who runs the rounds; each cluster lists its own.")
@options.HEADS
@options.HEAD_DIM
@click.option("--tokens", callback=options.read(options.number), metavar="N",
              help="Whole decode steps over so many tokens, and the rings' too.")  # fmt: skip
@click.option("--kv-heads", type=options.SIZE, help="With --tokens.  [heads]")
@click.option("--arrivals", "late", callback=options.read(arrivals), metavar="P:T|T+T+..",
              help="random, exponential, ascending, late:100us; each rank's instant.")  # fmt: skip
@click.option("--format", "form", type=click.Choice(["table", "svg", "rounds"]), default="table",
              help="One scheme with its critical path: svg over time, rounds as a schedule.")  # fmt: skip
@options.output_options("Write the drawing here instead of to the screen.")
def command(
    cluster: str | None,
    ranks: int | None,
    schemes: str,
    result: Result,
    placements: str,
    executor: str | None,
    heads: int,
    head_dim: int,
    tokens: int | None,
    kv_heads: int | None,
    late: Arrivals | None,
    form: str,
    output: Output,
) -> None:
    """Predict what a reduction costs on a cluster that need not be here, message by message. Needs no MPI.

    Each time and each ratio has an interval: docs/topology.md says what it holds.
    """
    named = needed(cluster)
    names = [name.strip() for name in schemes.split(",")]
    own = next((from_file(name) for name in names if is_file(name)), None)
    if ranks is None and own is not None:
        ranks = own.size
    if ranks is None:
        raise ArgumentError(f"--ranks N: over how many of the {named.cluster.places} places?")
    if form == "table" and output.out is not None:
        raise ArgumentError("--out takes a drawing: add --format svg or rounds, or write --json FILE")
    output.open()
    late = late or TOGETHER
    late.check(ranks)
    shape, payload = _shape(tokens, heads, kv_heads, head_dim), Payload(heads, 4 * (head_dim + 2))

    rings: dict[Placement, dict[str, float]] = {}  # of a whole step, whatever the scheme
    rows: list[dict[str, Any]] = []
    costs, drawn = [], []
    with Progress() as say:
        for name, where, schedule, places in _cases(
            named.cluster, ranks, names, placements.split(","), result, say
        ):
            run = functools.partial(simulate, schedule, named.cluster, places, payload, executor)
            simulation, times = _arriving(run, late, ranks, say, f"simulating {name}")
            costs.append(cost(simulation))
            drawn += [times] if times else []
            step = None
            if shape is not None:
                if places not in rings:
                    rings[places] = _rings(named.cluster, places, shape, executor)
                attention, reduction = rings[places]["attention"], simulation.time
                step = {"reduction": reduction, "time": attention + reduction, **rings[places]}
            label = f"{name} ({where})" if "," in placements else name
            facts = _facts(simulation, payload)
            rows.append({"scheme": name, "label": label, "placement": where, **facts, "decode_step": step})
    if form != "table" and len(rows) != 1:
        raise ArgumentError(f"--format {form} draws one scheme under one placement, not {len(rows)}: name it")
    for row, estimate in zip(rows, estimates(named.cluster, costs, drawn), strict=True):
        row |= {"estimate": estimate, "like_fastest": estimate.like_the_baseline}
    rows.sort(key=lambda row: row["estimate"].time)
    sure = rows[0]["estimate"]
    time = f"{microseconds(sure.time)} µs ({between(sure.low, sure.high, microseconds)})"
    said = headline(rows[0]["label"], time, rows, rows[0]["result"] == "scattered")
    made = Report({
        "cluster": named.cluster.name,
        "named_by": named.by,
        "ranks": ranks,
        "result": result,
        "arrivals": late.text,
        "bytes": payload.bytes,
        "headline": said,
        "rows": rows,
    })  # fmt: skip
    if form == "table":
        runs = " and ".join(dict.fromkeys(row["executor"] for row in rows))
        to_root = " to rank 0" if result == "root" else ""
        made.line(said)
        made.line(
            f"simulated: {ranks} ranks on {named.shown}; {payload.bytes:,} bytes each{to_root}; run by {runs}"
        )
        _show(made, rows, late, named.cluster)
    output.report(made)
    if form != "table":
        from treeattn.collectives.drawings import timeline  # loaded where something is drawn

        draw = {"svg": timeline.timeline, "rounds": timeline.rounds}[form]
        output.draw(draw(simulation), f"{rows[0]['scheme']} on {ranks} ranks, simulated")


def _rings(cluster: Cluster, places: Placement, shape: StepShape, executor: str | None) -> dict[str, float]:
    """Microseconds of a rank's attention, and of a whole step by each ring."""
    attention = attention_cost(cluster, len(places), shape)
    exchange = query_ring_exchange(cluster, places, shape, executor)
    return {
        "attention": attention.time,
        "kv_ring": kv_ring_cost(cluster, places, shape, executor).time,
        "query_ring": (attention + exchange).time,
    }


def _arriving(
    run: Callable[..., Simulation], late: Arrivals, ranks: int, say: Callable[[str], object], what: str
) -> tuple[Simulation, list[float]]:
    """Run a step as ranks arrive; of several that are drawn, the one that takes the median, and the times of
    all. One is held at a time: at 2,048 ranks each is 100,000 objects."""
    if not late.drawn:
        say(what)
        return run(late.starts(0, ranks)), []
    times = []
    for draw in range(DRAWS):
        say(f"{what}: arrivals {draw + 1} of {DRAWS}")
        times.append(run(late.starts(draw, ranks)).time)
    middle = sorted(range(DRAWS), key=times.__getitem__)[DRAWS // 2]
    return run(late.starts(middle, ranks)), times


def _shape(tokens: int | None, heads: int, kv_heads: int | None, head_dim: int) -> StepShape | None:
    """The whole decode step, where it is asked for."""
    if tokens is None:
        if kv_heads is not None:
            raise ArgumentError(
                "--kv-heads says how large the cache is: give --tokens N too, or leave it out"
            )
        return None
    if heads % (kv_heads or 1):
        raise ArgumentError(f"--kv-heads {kv_heads} does not divide --heads {heads}: give a divisor")
    return StepShape(tokens, heads, kv_heads or heads, head_dim)


def _cases(
    cluster: Cluster, ranks: int, names: list[str], placements: list[str], result: Result, say: Progress
) -> Iterator[tuple[str, str, Schedule, Placement]]:
    """Prove every scheme under every placement; of all schemes, those that refuse this size are left out."""
    every = names == ["all"]
    for name in collectives.names("schedule") if every else dict.fromkeys(names):
        for where in map(str.strip, placements):
            suited = where == "suited"
            places = placed(cluster, ranks, "block" if suited else where)
            say(f"proving {name} on {ranks} ranks")
            try:
                nodes = placement.node_groups(cluster, places)
                own = from_file(name, ranks, "--ranks says") if is_file(name) else None
                schedule = with_result(own or build(name, ranks, nodes), result)
            except RestrictionError:
                if not every:
                    raise
                continue
            collectives.check(schedule)
            places = placement.suited(cluster, schedule) if suited else places
            yield schedule.name if is_file(name) else select(name).text, where, schedule, places


def placed(cluster: Cluster, ranks: int, where: str) -> Placement:
    """Read where ranks sit. Raises `ArgumentError`."""
    if where in placement.PLACEMENTS:
        return placement.PLACEMENTS[where](cluster, ranks)
    try:
        given = tuple(map(int, where.split("+")))
    except ValueError:
        known = ", ".join([*placement.PLACEMENTS, "suited"])
        raise ArgumentError(
            f"--placement {where!r:.40}: take {known}, or the place of each rank as 0+8+1+9"
        ) from None
    places = placement.explicit(cluster, given)
    if len(places) != ranks:
        raise ArgumentError(
            f"--placement {where:.40}: {len(places)} places for {ranks} ranks; give one for each"
        )
    return places


def estimated() -> list[Column[dict[str, Any]]]:
    """Columns of the `Estimate` of a row: microseconds, and the ratio to the fastest."""

    def ends(row: dict[str, Any]) -> str | None:
        sure = row["estimate"]
        return None if sure.is_baseline else between(sure.ratio_low, sure.ratio_high, ratio)

    return [
        Column("µs", lambda row: row["estimate"].time, microseconds),
        Column("95 %", lambda row: between(row["estimate"].low, row["estimate"].high, microseconds)),
        Column("ratio", lambda row: row["estimate"].ratio, ratio),
        Column("95 %", ends),
    ]


def _show(made: Report, rows: list[dict[str, Any]], late: Arrivals, cluster: Cluster) -> None:
    fastest, step = rows[0], rows[0]["decode_step"]
    same: dict[tuple[object, ...], list[dict[str, Any]]] = {}  # messages, which stand in one row
    for row in rows:
        price = microseconds(row["estimate"].time)
        same.setdefault((row["sends"], row["placement"], price), []).append(row)
    shown = [of[0] | {"scheme": " = ".join(row["scheme"] for row in of)} for of in same.values()]
    columns: list[Column[dict[str, Any]]] = [Column("scheme", words=True)]
    if len({row["placement"] for row in rows}) > 1:
        columns.append(Column("placement", words=True))
    columns += estimated()
    if step is None:
        columns.append(Column("NIC", "busiest_card_bytes", count))
    else:
        columns.append(Column("step, µs", lambda row: row["decode_step"]["time"], microseconds))
    made.table(shown, columns)
    made.line()
    if late != TOGETHER:
        drawn = f", median of {DRAWS} steps" if late.drawn else ""
        made.line(f"from the first entry to the last end, with arrivals {late.text}{drawn}")
    made.line(intervals.words(cluster, ((row["scheme"], row["estimate"]) for row in rows)))
    if step is None:
        made.line("NIC: bytes of the card that sends most")
    made.line(f"floor, what no scheme is faster than: {microseconds(fastest['floor_microseconds'])} µs")
    if step is not None:
        both = f"attention {step['attention']:,.1f} µs + reduction {step['reduction']:,.1f} µs"
        rings = f"kv_ring {step['kv_ring']:,.0f} µs, query_ring {step['query_ring']:,.1f} µs"
        made.line(f"whole step: {both}; {rings}")
    made.line(f"{fastest['scheme']}: {fastest['critical_path']}")
    if (share := fastest["assumed_share"]) >= 0.005:
        made.line(f"*: by prices that are assumed, not measured; they make {share:.0%} of this time")


def _facts(simulation: Simulation, payload: Payload) -> dict[str, Any]:
    path, nodes = critical_path(simulation), placement.node_groups(simulation.cluster, simulation.places)
    return {
        **counts(simulation.schedule, nodes, payload.records, payload.record_bytes, payload.group),
        "result": simulation.schedule.result,
        "executor": simulation.executor,
        "assumed_share": assumed_share(path),
        "microseconds": simulation.time,
        "floor_microseconds": simulation.bound,
        "tiers": [{"tier": t.tier, "messages": t.messages, "bytes": t.bytes} for t in simulation.traffic],
        "busiest_card_bytes": simulation.max_nic_bytes,
        "critical_path": in_words(path),
        "segments": [segment._asdict() for segment in path],
    }
