"""The points of a comparison: what the lists of the command line combine to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import click

from treeattn.attention.shape import DTYPES
from treeattn.cli.console import choose, durations, numbers
from treeattn.decoder import transport as transports
from treeattn.decoder.device import Cuda, Device
from treeattn.decoder.executor import EXECUTORS
from treeattn.decoder.plan import CATALOG, select
from treeattn.errors import ArgumentError, TransportError
from treeattn.study.compare.schema import NULL, SUM, Key
from treeattn.study.compare.steps import shape_of
from treeattn.study.compare.sweep import Way, keys

__all__ = ["points", "transports_of"]


def transports_of(world: Any, device: Device, wanted: str | None) -> tuple[str, ...]:
    """The transports that are compared. Collective; raises `ArgumentError` or `TransportError` on all ranks.

    From GPUs "all", or None, are those that serve here: rank 0 says which do not, and why.
    """
    if not isinstance(device, Cuda):
        return choose("--transport", wanted or "mpi", ("mpi",))
    problems = transports.problems(world, device.runtime)
    chosen = choose("--transport", wanted or "all", ("all", *problems))
    if "all" not in chosen:
        for name in chosen:
            if problem := problems[name]:
                raise TransportError(problem)
        return chosen
    for name, problem in problems.items():
        if problem and world.rank == 0:
            click.echo(f"left out transport {name}: {problem}", err=True)
    return tuple(name for name, problem in problems.items() if not problem)


def points(
    size: int,
    schemes: list[str] | None,
    lists: dict[str, str | None],
    device: str,
    over: Sequence[str],
) -> list[Key]:
    """Every point of the sweep, of all schemes for None. Raises `ArgumentError` or `ScheduleError`."""
    executors = _executors(lists["executor"], device)
    ranks = sorted(numbers("--ranks", lists["ranks"] or str(size)))
    if max(ranks) > size:
        raise ArgumentError(f"--ranks {max(ranks)}: this job has {size} ranks; start it with more")
    wires = choose(
        "--wire", lists["wire"] or "", ("float32", "bfloat16") if device == "cpu" else ("float32",)
    )
    own = lists["kv_heads"] is None
    place: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
    found = keys(
        _expanded(schemes or _serving(over), lists["radix"], lists["chunks"]),
        lambda scheme: _ways(scheme, place, over, executors),
        ranks=ranks,
        what=choose("--what", lists["what"] or "", ("reduce", "decode")),
        batch=numbers("--batch", lists["batch"] or ""),
        queries=numbers("--queries", lists["queries"] or ""),
        heads=numbers("--heads", lists["heads"] or ""),
        kv_heads=[0] if own else numbers("--kv-heads", lists["kv_heads"] or ""),
        head_dim=numbers("--head-dim", lists["head_dim"] or ""),
        dtype=choose("--dtype", lists["dtype"] or "", tuple(DTYPES)),
        wire=choose("--wire", lists["wire"] or "", wires),
        skew=durations("--skew", lists["skew"] or ""),
        tokens=numbers("--seq-len", lists["seq_len"] or ""),
    )
    for key in found:
        shape_of(key)
    return [key for key in found if schemes is not None or _may_run(key)]


def _executors(wanted: str | None, device: str) -> Sequence[Any]:
    """Who runs schedules, each of which makes points of its own; None: the best that there is."""
    if wanted is None:
        return (None,)
    if device != "cpu":
        raise ArgumentError(f"--executor {wanted} is for --device cpu: GPUs have transports to choose from")
    return choose("--executor", wanted, EXECUTORS)


def _ways(
    scheme: str, device: Literal["cpu", "cuda"], over: Sequence[str], executors: Sequence[Any]
) -> list[Way]:
    """Those of a scheme among what is compared. Raises where there is none."""
    if scheme == NULL:
        return [Way(device, "mpi" if device == "cpu" else "none")]
    if scheme == SUM:
        return [Way(device, name) for name in over if name in ("mpi", "host", "nccl", "cuda-mpi")]
    row = select(scheme).row
    serving = [name for name in over if name in row.transports]
    if not serving:  # raises, with what would serve
        transports.choose(device, over[0], row, 2)
    return [Way(device, name, who) for name in serving for who in ((None,) if row.module else executors)]


def _may_run(key: Key) -> bool:
    """Whether ``all`` has a scheme. Library calls and scattered schedules have no bfloat16 records, and the
    merge that an MPI library calls has float32 alone."""
    if key.wire == "float32" or key.scheme in (SUM, NULL):
        return True
    row = select(key.scheme).row
    return row.kind != "library" if key.wire == "float64" else row.kind == "schedule" and not row.scattered


def _serving(over: Sequence[str]) -> list[str]:
    """Every scheme that one of these transports serves."""
    return [name for name, row in CATALOG.items() if set(over) & set(row.transports)]


def _expanded(chosen: list[str], radix: str | None, chunks: str | None) -> list[str]:
    """Canonical schemes, one for each radix and chunks where they take such; the sum and null first."""
    for parameter, text in (("radix", radix), ("chunks", chunks)):
        if text is not None:
            values = numbers(f"--{parameter}", text)
            chosen = [variant for name in chosen for variant in _variants(name, parameter, values)]
    return list(dict.fromkeys([NULL, SUM, *chosen]))


def _variants(scheme: str, parameter: str, values: Sequence[int]) -> list[str]:
    selection = select(scheme)
    if selection.row.parameter(parameter) is None or parameter in dict(selection.given):
        return [scheme]
    return [select(f"{scheme}:{parameter}={value}").text for value in values]
