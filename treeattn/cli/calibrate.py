"""``treeattn calibrate``: the prices of the machine that the job runs on, as a cluster file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import click
import msgspec
import numpy as np
from msgspec import structs

from treeattn.cli import options
from treeattn.cli.options import Output
from treeattn.collectives.clusters.description import Cluster
from treeattn.decoder.request import MPI_EXECUTORS
from treeattn.errors import ArgumentError
from treeattn.report import Column, Progress, Report, count, microseconds
from treeattn.study import environment
from treeattn.study.calibration import HEAD_DIM, Calibration, calibrate
from treeattn.study.fit import Residual

_NAME = re.compile("[a-z0-9][a-z0-9_-]*")


@click.command("calibrate")
@click.option("--executor", type=click.Choice(MPI_EXECUTORS),
              help="Who runs the rounds; default the best that there is.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(1, 3600), default=20.0,
              help="About so long for all measurements.")  # fmt: skip
@options.output_options("The cluster file to write.", "FILE.toml", json="Write every measurement.")
def command(executor: str | None, seconds: float, output: Output) -> None:
    """Measure what messages cost between the ranks of this job, and write it as a cluster file.

    simulate --cluster FILE.toml, tune and compare --cluster FILE.toml read it. Run it as the job would be:
    mpiexec -n 8 treeattn calibrate --out here.toml.
    """
    world = options.world()
    if not math.isfinite(seconds):
        raise ArgumentError(f"--seconds {seconds}: give a number of seconds")
    path = output.out
    if path is None or path.suffix != ".toml" or not _NAME.fullmatch(path.stem):
        raise ArgumentError(
            f"--out {str(path)!r}: name it FILE.toml, in small letters, digits, - and _: the cluster is "
            "called by it"
        )
    output.open(world=world)
    found = calibrate(world, path.stem, executor, seconds, Progress(world.rank == 0))
    if found is None:
        return
    fitted, software = found.fitted, environment.software()
    output.write(as_toml(found.cluster, _comments(world.size, found, software)).encode())
    rows = [_facts(one) for one in fitted.residuals]
    made = Report({
        **software,
        "cluster": found.cluster.about,
        "places": found.places,
        "seconds": found.seconds,
        "hosts": found.hosts,
        "load": found.load,
        "drift": found.drift,
        "scatter": found.cluster.scatter,
        "prices": {
            name: {"value": value, "error": fitted.errors[name]} for name, value in fitted.prices.items()
        },
        "residuals": rows,
        "left_out": [_facts(one) for one in fitted.left_out],
    })  # fmt: skip
    made.table(rows, [
        Column("tier", words=True),
        Column("probe", "kind", words=True),
        Column("bytes", lambda row: row["bytes"] if row["groups"] else None, count),
        Column("measured, µs", "measured_us", microseconds),
        Column("fitted", "fitted_us", microseconds),
        Column("error", lambda row: row["fitted_us"] / row["measured_us"] - 1, "+.0%"),
    ])  # fmt: skip
    made.line("\nprices, µs and GB/s, within so many percent")
    made.table(fitted.prices.items(), [
        Column("price", lambda row: row[0], words=True),
        Column("", lambda row: row[1], ".3g"),
        Column("standard\nerror", lambda row: fitted.errors[row[0]], ".0%"),
    ])  # fmt: skip
    made.line(f"attention of each rank reads {found.cluster.memory:.3g} GB/s while all do")
    made.line(_errors(found))
    made.line(f"{path} holds the cluster; it took {found.seconds:.0f} s")
    output.report(made)


def _errors(found: Calibration) -> str:
    left_out = (
        f"; of kinds of probes left out of it: {_spread(found.fitted.left_out)}"
        if found.fitted.left_out
        else ""
    )
    drift = f"the last block took {found.drift - 1:+.0%} beside the first"
    return f"errors of the fit: {_spread(found.fitted.residuals)}{left_out}; {drift}"


def _spread(residuals: Sequence[Residual]) -> str:
    errors = [abs(one.error) for one in residuals]
    return f"median {np.median(errors):.0%}, largest {max(errors):.0%}"


def _comments(ranks: int, found: Calibration, software: dict[str, Any]) -> Iterator[str]:
    now = datetime.now(timezone.utc)
    commit = software["git"] or "no commit"
    yield f"Written by treeattn calibrate at {now:%Y-%m-%d %H:%M} UTC after {found.seconds:.0f} s."
    yield f"treeattn {software['packages']['treeattn']} ({commit}), {' '.join(software['mpi'].split())}"
    before, after = found.load
    yield f"{ranks} ranks on {', '.join(found.hosts)}; load {before:.1f} before, {after:.1f} after"
    yield from f"{_errors(found).capitalize()}.".split("; ")


def _facts(residual: Residual) -> dict[str, Any]:
    probe = residual.probe
    return {
        "kind": probe.kind,
        "tier": probe.tier,
        "scheme": probe.scheme,
        "groups": probe.groups,
        "bytes": 4 * (HEAD_DIM + 2) * probe.records,
        "measured_us": residual.measured,
        "fitted_us": residual.fitted,
    }


def as_toml(cluster: Cluster, comments: Iterable[str] = ()) -> str:
    """The file, `comments` above it line by line. Numbers keep six digits; defaults are left out."""
    lines = [f"# {line}".rstrip() for line in comments]
    lines += _table(cluster)
    for tier in cluster.tiers:
        lines += ["", "[[tiers]]", *_table(tier)]
    for name, executor in cluster.executors.items():
        lines += ["", f"[executors.{name}]", *_table(executor)]
    return "\n".join(lines) + "\n"


def _table(data: msgspec.Struct) -> Iterator[str]:
    """A line for each field that is no table and not its default."""
    for field in structs.fields(data):
        value = getattr(data, field.name)
        if field.name not in ("tiers", "executors") and value != field.default:
            yield f"{field.name} = {_value(value)}"


def _value(value: Any) -> str:
    """Strings and truth values are spelled as in JSON."""
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if isinstance(value, msgspec.Struct):
        return "{ " + ", ".join(_table(value)) + " }"
    if isinstance(value, tuple):
        return "[\n" + "".join(f"    {_value(item)},\n" for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)
