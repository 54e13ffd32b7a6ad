"""``treeattn topology``: where the ranks of this job are."""

from __future__ import annotations

from dataclasses import asdict

import click

from treeattn.cli.options import Output, output_options
from treeattn.hardware import LEGEND
from treeattn.mpi import communicators
from treeattn.mpi.topology import detect
from treeattn.report import Report


@click.command("topology")
@output_options(wide=False, json="Write what was found.")
def command(output: Output) -> None:
    """Draw the ranks of this job on nodes and sockets, with GPUs, NICs, what joins them, and what the
    launcher says.

    Run it as the job would be: mpiexec -n 8 treeattn topology.
    """
    world = communicators.world()
    output.open(world=world)
    found = detect(world, devices=True)
    if world.rank:
        return
    cluster, places = found.cluster()
    made = Report({
        "nodes": found.nodes,
        "sockets": found.sockets,
        "binding": found.binding,
        "ranks": [asdict(rank) for rank in found.ranks],
        "devices": [asdict(devices) for devices in found.devices],
        "cluster": cluster.about,
        "places": places,
        "over_sockets": found.over_sockets,
    })  # fmt: skip
    made.text(found.drawing())
    if any(devices.links for devices in found.devices):
        made.text(f"\n{LEGEND}")
    said = ", ".join(f"{name}={value}" for name, value in found.ranks[0].launcher.items())
    made.text(f"\nlauncher, rank 0: {said or 'says nothing of places'}\n{found.binding}")
    if found.over_sockets:
        made.text(f"scheme over sockets and nodes: {found.over_sockets}")
    made.text(f"to simulate: {cluster.about}")
    output.report(made)
