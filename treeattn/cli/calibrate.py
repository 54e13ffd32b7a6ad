"""``treeattn calibrate``: the prices of the machine that the job runs on, as a cluster file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import numpy as np

from treeattn import comm as comm_
from treeattn import files
from treeattn.cli.console import WIDE, Cell, Lines, console, count, microseconds, table
from treeattn.collectives.clusters.fit import Residual
from treeattn.collectives.clusters.writing import as_toml
from treeattn.decoder.executor import EXECUTORS
from treeattn.errors import ArgumentError
from treeattn.study import environment
from treeattn.study.calibration import HEAD_DIM, Calibration, calibrate

__all__ = ["command"]

_NAME = re.compile("[a-z0-9][a-z0-9_-]*")


@click.command("calibrate")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="FILE.toml",
              help="The cluster file to write.")  # fmt: skip
@click.option("--executor", type=click.Choice(EXECUTORS),
              help="Who runs the rounds; default the best that there is.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(1, 3600), default=20.0, show_default=True,
              help="About so long for all measurements.")  # fmt: skip
@WIDE
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write every measurement.")
def command(out: Path, executor: str | None, seconds: float, wide: bool, json_path: Path | None) -> None:
    """Measure what messages cost between the ranks of this job, and write it as a cluster file.

    simulate --cluster FILE.toml, compare --cluster FILE.toml and --scheme auto:cluster=FILE.toml read it. Run
    it as the job would be: mpiexec -n 8 treeattn calibrate --out here.toml.
    """
    world = comm_.world()
    if not math.isfinite(seconds):
        raise ArgumentError(f"--seconds {seconds}: give a number of seconds")
    said = (str(out), executor, seconds, str(json_path))
    comm_.agree(world, {"the command line": said})
    if out.suffix != ".toml" or not _NAME.fullmatch(out.stem):
        raise ArgumentError(
            f"--out {str(out)!r}: name it FILE.toml, in small letters, digits, - and _: the cluster is "
            "called by it"
        )
    comm_.together(world, lambda: files.check_distinct([out, json_path]))
    paths = (out, json_path) if world.rank == 0 else (None, None)
    write, write_json = comm_.together(world, lambda: tuple(map(files.output_writer, paths)))
    found = calibrate(world, out.stem, executor, seconds, Lines(world.rank == 0))
    if found is None:
        return
    write(as_toml(found.cluster, _comments(world.size, found)).encode())
    write_json(environment.as_json(_facts(found)))
    _print(found, out, wide)


def _comments(ranks: int, found: Calibration) -> Iterator[str]:
    errors = [abs(residual.error) for residual in found.residuals]
    yield f"Written by treeattn calibrate on {datetime.now(timezone.utc):%Y-%m-%d}, {ranks} ranks."
    yield f"Errors of the fit: median {np.median(errors):.0%}, largest {max(errors):.0%}."
    for residual in found.residuals:
        probe = residual.probe
        size = f"{4 * (HEAD_DIM + 2) * probe.records} B" if probe.groups else ""
        what = " ".join(filter(None, (probe.tier, probe.kind, size)))
        yield f"  {what:32} {residual.measured:10.1f} us measured, {residual.error:+5.0%}"


def _facts(found: Calibration) -> dict[str, Any]:
    return {
        **environment.software(),
        "cluster": found.cluster.about,
        "places": found.places,
        "seconds": found.seconds,
        "residuals": [
            {
                "kind": one.probe.kind,
                "tier": one.probe.tier,
                "scheme": one.probe.scheme,
                "groups": one.probe.groups,
                "bytes": 4 * (HEAD_DIM + 2) * one.probe.records,
                "measured_us": one.measured,
                "fitted_us": one.fitted,
            }
            for one in found.residuals
        ],
    }


def _print(found: Calibration, out: Path, wide: bool) -> None:
    screen = console(wide)
    columns: dict[str, Cell[Residual]] = {
        "tier": lambda row: row.probe.tier or "-",
        "probe": lambda row: row.probe.kind,
        "bytes": lambda row: count(4 * (HEAD_DIM + 2) * row.probe.records if row.probe.groups else None),
        "measured, µs": lambda row: microseconds(row.measured),
        "fitted": lambda row: microseconds(row.fitted),
        "error": lambda row: f"{row.error:+.0%}",
    }
    table(screen, columns, found.residuals, words=2)
    for tier in found.cluster.tiers:
        screen.print(
            f"{tier.name}: latency {microseconds(tier.latency)} µs, overhead {tier.overhead:.2f} µs, "
            f"{tier.bandwidth:.3g} GB/s"
        )
    screen.print(f"attention of each rank reads {found.cluster.memory:.3g} GB/s while all do")
    errors = [abs(row.error) for row in found.residuals]
    screen.print(f"errors of the fit: median {np.median(errors):.0%}, largest {max(errors):.0%}")
    screen.print(f"{out} holds the cluster; it took {found.seconds:.0f} s")
