"""Our simulator against SimGrid's on the same schedules and prices: python benchmarks/second_opinion.py

SimGrid (Casanova et al., JPDC 2014; Debian's libsimgrid-dev) replays each schedule as a trace of MPI calls:
what a rank computes, sends and receives, round by round. It differs where simulators may: messages that meet
at a port share it fairly and at once, where ours go one after the other, and arrivals are taken up in a fixed
order. Prices are those of a cluster file, without steps by message size, gaps and waiting senders, which
SimGrid has for a whole platform alone. What is stated is how far both are apart.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from xml.sax.saxutils import quoteattr

import harness
from msgspec import structs

from treeattn.collectives import Schedule, build, needs_nodes
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.placement import Placement, block, node_groups
from treeattn.collectives.clusters.simulate import Simulation, simulate
from treeattn.collectives.schedule import Payload
from treeattn.study import environment

# Of our time: how far apart they may be where no message waits for a port, and elsewhere.
BAND_ALONE, BAND = 0.01, 0.50

SCHEMES = (
    "chain", "binary_tree", "k_nomial_tree", "k_nomial_tree:radix=4", "recursive_doubling",
    "recursive_multiplying", "reduce_scatter_gather", "reduce_scatter_gather:order=near", "ring", "bine",
    "circulant", "double_binary_tree", "hierarchical", "split_rail", "multi_leader", "all_gather_merge",
)  # fmt: skip
# Name -> numbers of ranks. Of frontier two of each unit, so that messages go through tapered uplinks.
CLUSTERS = {"cpu-hdr200": (8, 32), "dgx-h100": (16, 32), "leonardo": (16,), "frontier": (32,)}
RECORDS = (16, 256)

# A second of theirs is a microsecond of ours: their clock would lose digits of microseconds.
_SETTINGS = {
    "network/model": "CM02", "network/bandwidth-factor": 1, "network/latency-factor": 1,
    "network/weight-S": 0, "network/TCP-gamma": 1e30, "network/crosstraffic": 0,
    "smpi/async-small-thresh": 1 << 30, "smpi/send-is-detached-thresh": 1 << 30,
    "smpi/display-timing": "yes", "cpu/model": "Cas01",
}  # fmt: skip


def problem() -> str | None:
    """Why there is no second opinion here."""
    return None if shutil.which("smpirun") else "smpirun is not installed: apt-get install libsimgrid-dev"


def runs_on(cluster: Cluster) -> str:
    """An executor whose receivers do not fetch, which SimGrid's do not."""
    return next(name for name in ("nccl", "program") if name in cluster.executors)


def plain(cluster: Cluster) -> Cluster:
    """Without what SimGrid has no place for, and without rounds, which would hide how messages differ."""
    name = runs_on(cluster)
    executors = {name: structs.replace(cluster.executors[name], round=0.0)}
    tiers = tuple(structs.replace(tier, protocols=(), gap=0.0) for tier in cluster.tiers)
    return structs.replace(cluster, tiers=tiers, executors=executors, executor=name)


def cluster_of(name: str) -> Cluster:
    """A shipped cluster as both simulators know it; frontier with two of each unit."""
    cluster = plain(description.load(name))
    if name != "frontier":
        return cluster
    return structs.replace(
        cluster, cards=2, tiers=tuple(structs.replace(tier, joins=2) for tier in cluster.tiers)
    )


def platform(cluster: Cluster, places: Placement) -> Iterator[str]:
    """Hosts that do one operation in a second, and a route for each pair: ports at both ends, and latency."""
    yield '<?xml version="1.0"?><!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">'
    yield '<platform version="4.1"><zone id="all" routing="Full">'
    yield from (f'<host id="h{rank}" speed="1f"/>' for rank in range(len(places)))
    routes, links = [], {}
    for src, here in enumerate(places):
        for dst, there in enumerate(places):
            if src != dst:
                path = list(_links(cluster, src, here, dst, there))
                links |= dict(path)
                used = "".join(f"<link_ctn id={quoteattr(name)}/>" for name, _ in path)
                routes.append(f'<route src="h{src}" dst="h{dst}" symmetrical="NO">{used}</route>')
    yield from (f"<link id={quoteattr(name)} {attributes}/>" for name, attributes in links.items())
    yield from routes
    yield "</zone></platform>"


def _links(cluster: Cluster, src: int, here: int, dst: int, there: int) -> Iterator[tuple[str, str]]:
    """(name, attributes) of what a message goes through."""
    tier = cluster.tier_between(here, there)
    link = cluster.link(tier, 0)
    rate = f'bandwidth="{1 / link.byte:.9g}Bps" latency="0s"'
    if tier > cluster.node_tier:
        nodes = [(place // cluster.slots, place % cluster.slots) for place in (here, there)]
        out, into = (f"card {node}.{slot * cluster.cards // cluster.slots}" for node, slot in nodes)
    elif cluster.tiers[tier].mesh:
        out = into = f"mesh {src}-{dst}"
    else:
        out, into = f"rank {tier}.{src}", f"rank {tier}.{dst}"
    yield f"{out} out", rate
    yield f"{into} in", rate
    for outer in range(cluster.node_tier + 1, tier + 1):
        if taper := cluster.tiers[outer].taper:
            width = cluster.widths[outer - 1]
            cards = width // cluster.slots * cluster.cards
            shared = f'bandwidth="{cards / taper / link.byte:.9g}Bps" latency="0s"'
            yield f"uplink {outer}.{here // width} out", shared
            yield f"uplink {outer}.{there // width} in", shared
    under_way = f'bandwidth="1e30Bps" latency="{link.latency:.9g}s" sharing_policy="FATPIPE"'
    yield f"latency {cluster.tiers[tier].name}", under_way


def meet(found: Simulation) -> bool:
    """Whether some message had to wait for a port in our simulation."""
    return any(
        flight.last_port - flight.ready > found.cluster.link(flight.tier, flight.bytes).latency + 1e-6
        for flight in found.flights
    )


def trace(schedule: Schedule, cluster: Cluster, places: Placement, payload: Payload) -> list[list[str]]:
    """Lines of each rank, as `smpirun -replay` reads them."""
    executor = cluster.executors[cluster.executor]
    lines: list[list[str]] = [["init", f"compute {executor.call:.9g}"] for _ in places]
    for _, in_round in groupby(schedule.traffic(payload.records, payload.group), key=attrgetter("round")):
        sends, merges, receives = (defaultdict[int, list[str]](list) for _ in range(3))
        for tag, message in enumerate(in_round):
            size = message.records * payload.record_bytes
            tier = cluster.tier_between(places[message.src], places[message.dst])
            cost = cluster.link(tier, size).overhead + executor.message
            sends[message.src] += [f"compute {cost:.9g}", f"isend {message.dst} {tag} {size} 6"]
            receives[message.dst].append(f"irecv {message.src} {tag} {size} 6")
            cost += size * 1e-3 / executor.merge_bandwidth if message.merge else 0.0
            merges[message.dst] += [f"wait {message.src} {message.dst} {tag}", f"compute {cost:.9g}"]
        for rank in {*sends, *receives}:
            lines[rank] += [f"compute {executor.round:.9g}", *receives[rank], *sends[rank]]
            lines[rank] += [*merges[rank], "waitall"]
    return [[f"{rank} {line}" for line in [*own, "finalize"]] for rank, own in enumerate(lines)]


def simgrid(schedule: Schedule, cluster: Cluster, places: Placement, payload: Payload) -> float:
    """Microseconds by SimGrid."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "platform.xml").write_text("\n".join(platform(cluster, places)))
        (folder / "hosts").write_text("".join(f"h{rank}\n" for rank in range(schedule.size)))
        files = []
        for rank, lines in enumerate(trace(schedule, cluster, places, payload)):
            files.append(folder / f"rank{rank}.txt")
            files[-1].write_text("\n".join(lines) + "\n")
        (folder / "all").write_text("\n".join(map(str, files)) + "\n")
        settings = [f"--cfg={name}:{value}" for name, value in _SETTINGS.items()]
        done = subprocess.run(
            ["smpirun", "-np", str(schedule.size), "-platform", folder / "platform.xml", "-hostfile",
             folder / "hosts", *settings, "-replay", folder / "all"],
            capture_output=True, text=True, cwd=folder,
        )  # fmt: skip
    found = re.search(r"Simulated time: ([0-9.e+-]+) seconds", done.stdout + done.stderr)
    if done.returncode or not found:
        raise RuntimeError(f"smpirun: {done.stdout[-300:]}{done.stderr[:900]}")
    return float(found[1])


def ours(name: str, ranks: int, scheme: str, records: int) -> Simulation:
    """By our simulator."""
    cluster = cluster_of(name)
    places = block(cluster, ranks)
    schedule = build(scheme, ranks, nodes=node_groups(cluster, places) if needs_nodes(scheme) else None)
    return simulate(schedule, cluster, places, Payload(records))


def compared(name: str, ranks: int, scheme: str, records: int) -> dict:
    """Both times of one case."""
    found, payload = ours(name, ranks, scheme, records), Payload(records)
    theirs = simgrid(found.schedule, found.cluster, found.places, payload)
    return {"cluster": name, "ranks": ranks, "scheme": scheme, "bytes": payload.bytes, "meet": meet(found),
            "ours_us": found.time, "simgrid_us": theirs, "difference": theirs / found.time - 1}  # fmt: skip


def main() -> None:
    options = harness.options(__doc__)
    if why := problem():
        harness.stop(why)
    rows = [
        compared(name, ranks, scheme, records)
        for name, sizes in CLUSTERS.items()
        for ranks in sizes
        for scheme in SCHEMES
        for records in RECORDS
    ]
    version = subprocess.run(["smpirun", "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    facts = {**environment.software(), "simgrid": version, "bands": [BAND_ALONE, BAND], "rows": rows}
    for words, meeting, band in (("wait for no port", False, BAND_ALONE), ("wait", True, BAND)):
        apart = sorted(abs(row["difference"]) for row in rows if row["meet"] is meeting)
        found = statistics.median(apart), apart[int(0.9 * len(apart))], apart[-1]
        facts[words] = {"cases": len(apart), **dict(zip(("median", "p90", "largest"), found, strict=True))}
        shown = ", ".join(f"{value:.1%}" for value in found)
        print(f"messages {words}: {len(apart)} cases; median, 90 %, largest: {shown}; band {band:.0%}")
    options.write(facts)


if __name__ == "__main__":
    main()
