"""Seconds to generate and to check each scheme at many ranks: python benchmarks/plans.py [--ranks 4096]

Goal: under 2 seconds together at 4096 ranks for schemes with O(p log p) transfers. Schemes with p squared
transfers refuse such a plan; that is shown too.
"""

from __future__ import annotations

import time

import harness

from treeattn import collectives
from treeattn.errors import RestrictionError


def measure(scheme: str, ranks: int, repeats: int) -> dict:
    """Best of `repeats`; a refusal is a result too."""
    nodes = {"nodes": f"{ranks // 8}x8"} if collectives.needs_nodes(scheme) and ranks % 8 == 0 else {}
    best = [float("inf")] * 2
    for _ in range(repeats):
        began = time.perf_counter()
        try:
            schedule = collectives.build(scheme, ranks, **nodes)
        except RestrictionError as refusal:
            return {"scheme": scheme, "ranks": ranks, "refused": str(refusal)}
        built = time.perf_counter()
        collectives.check(schedule)
        best = [min(best[0], built - began), min(best[1], time.perf_counter() - built)]
    return {
        "scheme": schedule.name,
        "ranks": ranks,
        "transfers": schedule.messages,
        "generate_s": best[0],
        "check_s": best[1],
    }


def main() -> None:
    options = harness.options(__doc__, ranks=4096, repeats=3)
    rows = [measure(scheme, options.ranks, options.repeats) for scheme in collectives.names("schedule")]
    for row in rows:
        if "refused" in row:
            print(f"{row['scheme']:36s} refused")
        else:
            seconds = f"{row['generate_s'] + row['check_s']:6.2f} s ({row['check_s']:.2f} checking)"
            print(f"{row['scheme']:36s} {row['transfers']:7d} transfers {seconds}")
    options.write(harness.source() | {"plans": rows})


if __name__ == "__main__":
    main()
