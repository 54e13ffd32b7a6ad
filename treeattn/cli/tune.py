"""``treeattn tune``: schedules for a described machine, the best of them written to a file."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click

from treeattn.cli import options
from treeattn.cli.options import Output
from treeattn.cli.simulate import estimated, placed
from treeattn.collectives.clusters.bound import lower_bound
from treeattn.collectives.clusters.synthesis import Machine, front, search
from treeattn.collectives.schedule import Payload
from treeattn.errors import ArgumentError
from treeattn.mpi.topology import needed
from treeattn.report import Column, Progress, Report, count, microseconds
from treeattn.study import intervals
from treeattn.study.intervals import estimates
from treeattn.study.why import headline


@click.command("tune")
@options.CLUSTER
@click.option("--ranks", type=click.IntRange(2, 2**20), required=True, help="Number of ranks.")
@click.option("--placement", "where", default="block", metavar="P|0+8+1+9",
              help="Where ranks sit: block, cyclic, or the place of each.")  # fmt: skip
@click.option("--executor", help="Who runs the rounds; each cluster lists its own.")
@options.HEADS
@options.HEAD_DIM
@options.output_options("Write the fastest as a schedule for decode --scheme FILE.json.")
def command(
    cluster: str | None,
    ranks: int,
    where: str,
    executor: str | None,
    heads: int,
    head_dim: int,
    output: Output,
) -> None:
    """Search for the schedule that suits a machine: the catalogue's schemes and parameters, and ranks
    reordered, each proved and simulated. Needs no MPI.

    Shows what nothing else beats in time, bytes of the busiest NIC, and identical bits, and the name to pass
    as --scheme.
    """
    named = needed(cluster)
    if output.out is not None and output.out.suffix != ".json":
        raise ArgumentError(f"--out {str(output.out)!r}: schedules are files that end in .json; name it so")
    output.open()
    payload = Payload(heads, 4 * (head_dim + 2))
    machine = Machine(named.cluster, placed(named.cluster, ranks, where), payload, executor)
    with Progress() as say:
        everything, left = search(machine, say)
    best = front(everything)
    by_name = next(one for one in everything if "," not in one.name)  # not reordered
    executors, runs = named.cluster.executors, named.cluster.executor_for(machine.places, executor)
    floor = lower_bound(named.cluster, machine.places, payload.bytes, executors[runs])
    output.write((replace(best[0].schedule, name="tuned").to_json() + "\n").encode())
    rows: list[dict[str, Any]] = [
        {
            "schedule": one.name,
            "label": one.name,
            "microseconds": one.time,
            "busiest_card_bytes": one.max_nic_bytes,
            "determinism": one.bits,
            "messages": one.schedule.messages,
            "estimate": estimate,
            "like_fastest": estimate.like_the_baseline,
            "on_the_front": one in best,
        }
        for one, estimate in zip(
            everything, estimates(named.cluster, [one.cost for one in everything]), strict=True
        )
    ]
    shown = [row for row in rows if row["on_the_front"]]
    beaten = [row["like_fastest"] for row in rows if not row["on_the_front"]]
    share = sum(time for (_, assumed), time in best[0].cost.by_price.items() if assumed) / best[0].time
    made = Report({
        "cluster": named.cluster.name,
        "named_by": named.by,
        "ranks": ranks,
        "bytes": payload.bytes,
        "executor": runs,
        "assumed_share": share,
        "floor_microseconds": floor,
        "not_priced": left,
        "scheme": by_name.name,
        "rows": rows,
        "fastest": json.loads(best[0].schedule.to_json()),
    })  # fmt: skip
    said = headline(best[0].name, f"{microseconds(best[0].time)} µs", shown)
    made.line(f"{said}; of {len(beaten)} others {sum(beaten)} cannot be told apart from it")
    made.line(f"simulated: {ranks} ranks on {named.shown}; {payload.bytes:,} bytes each; run by {runs}")
    made.table(shown, [
        Column("schedule", words=True),
        *estimated(),
        Column("NIC", "busiest_card_bytes", count),
        Column("bits", lambda row: "always" if row["determinism"] == "A" else "in order"),
    ])  # fmt: skip
    made.line(
        f"\n{len(everything)} candidates; shown is what none beats in time, bytes of the busiest NIC and bits"
    )
    made.line(intervals.words(named.cluster, ((row["label"], row["estimate"]) for row in shown)))
    made.line("bits: always, by any merge that commutes; in order, where ranks fold in one order, as here")
    if share >= 0.005:
        made.line(f"assumed prices: {share:.0%} of the fastest's time")
    if left:
        made.line(f"not priced, for their many messages: {', '.join(left)}")
    made.line(f"the fastest that has a name: --scheme '{by_name.name}', {by_name.time:.3g} µs")
    if output.out is not None:
        path = output.out
        made.text(f"{path} holds the fastest: treeattn decode --scheme {path}, treeattn schedule {path}")
    output.report(made)
