"""``treeattn tune``: schedules for a described machine, the best of them written to a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from treeattn import files
from treeattn.cli.console import WIDE, Cell, Lines, console, count, microseconds, table
from treeattn.cli.simulate import placed
from treeattn.collectives.clusters.bound import lower_bound
from treeattn.collectives.clusters.simulate import Payload
from treeattn.collectives.clusters.synthesis import Machine, Priced, front, improved, search
from treeattn.errors import ArgumentError
from treeattn.study import environment
from treeattn.topology import Described, described, unnamed

__all__ = ["command"]

_STARTS = 4  # of the front, from which changes are tried


@click.command("tune")
@click.option("--cluster", metavar="NAME|FILE.toml", help="A shipped cluster, or a file, as of calibrate; "
              "default TREEATTN_CLUSTER.")  # fmt: skip
@click.option("--ranks", type=click.IntRange(2), required=True, help="Number of ranks.")
@click.option("--placement", "where", default="block", show_default=True, metavar="P|0+8+1+9",
              help="Where ranks sit: block, cyclic, or the place of each.")  # fmt: skip
@click.option("--executor", help="Who runs the rounds; each cluster lists its own.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--queries", type=click.IntRange(1), default=1, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=16, show_default=True)
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True)
@click.option("--moves", type=click.IntRange(0, 1_000_000), default=500, show_default=True,
              help="Changes that are tried, on the fastest few.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of those changes.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE.json",
              help="Write the fastest as a schedule for decode --scheme FILE.json.")  # fmt: skip
@WIDE
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write everything that was priced."
)
def command(
    cluster: str | None,
    ranks: int,
    where: str,
    executor: str | None,
    batch: int,
    queries: int,
    heads: int,
    head_dim: int,
    moves: int,
    seed: int,
    out: Path | None,
    wide: bool,
    json_path: Path | None,
) -> None:
    """Search for the schedule that suits a machine: the catalogue's schemes and parameters, ranks reordered,
    and changes of single transfers, each proved and simulated. Needs no MPI.

    Shows what nothing else beats in time, bytes of the busiest network card, and identical bits.
    """
    named = described(cluster)
    if named is None:
        raise unnamed()
    if out is not None and out.suffix != ".json":
        raise ArgumentError(f"--out {str(out)!r}: schedules are files that end in .json; name it so")
    files.check_distinct([out, json_path])
    write, write_json = files.output_writer(out), files.output_writer(json_path)
    payload = Payload(batch * heads * queries, 4 * (head_dim + 2), queries)
    found = named.cluster
    machine = Machine(found, placed(found, ranks, where), payload, executor)
    say = Lines()
    priced, left = search(machine, say)
    starts = front(priced)[:_STARTS]
    better = [improved(machine, start, moves // len(starts), seed, say) for start in starts]
    everything = [*priced, *(one for one in better if one not in priced)]
    best = front(everything)
    floor = lower_bound(found, machine.places, payload.bytes, found.runs(executor))
    _print(named, machine, best, floor, len(priced), left, wide)
    winner = replace(best[0].schedule, name="tuned")
    write((winner.to_json() + "\n").encode())
    write_json(environment.as_json(_facts(named, machine, everything, best, floor, left)))
    if out is not None:
        print(f"{out} holds the fastest: treeattn decode --scheme {out}, treeattn schedule {out}")


def _print(
    named: Described,
    machine: Machine,
    best: list[Priced],
    floor: float,
    tried: int,
    left: list[str],
    wide: bool,
) -> None:
    screen = console(wide)
    screen.print(f"{len(machine.places)} ranks on {named.shown}; {machine.payload.bytes:,} bytes each")
    columns: dict[str, Cell[Priced]] = {
        "schedule": lambda row: row.name,
        "µs": lambda row: microseconds(row.time),
        "x floor": lambda row: f"{row.time / floor:.2f}",
        "card": lambda row: count(row.card),
        "bits": lambda row: "always" if row.bits == "A" else "in order",
        "messages": lambda row: count(row.schedule.messages),
    }
    table(screen, columns, best)
    screen.print(
        f"\n{tried} candidates; shown is what none beats in time, bytes of the busiest card, and bits"
    )
    screen.print("bits: always, by any merge that commutes; in order, where ranks fold in one order, as here")
    if left:
        screen.print(f"not priced, for their many messages: {', '.join(left)}")


def _facts(
    named: Described,
    machine: Machine,
    everything: list[Priced],
    best: list[Priced],
    floor: float,
    left: list[str],
) -> dict[str, object]:
    return {
        "cluster": named.cluster.name,
        "named_by": named.by,
        "ranks": len(machine.places),
        "bytes": machine.payload.bytes,
        "floor_microseconds": floor,
        "not_priced": left,
        "rows": [
            {
                "schedule": one.name,
                "microseconds": one.time,
                "busiest_card_bytes": one.card,
                "determinism": one.bits,
                "messages": one.schedule.messages,
                "on_the_front": any(one is other for other in best),
            }
            for one in everything
        ],
        "fastest": json.loads(best[0].schedule.to_json()),
    }
