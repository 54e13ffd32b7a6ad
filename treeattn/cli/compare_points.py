"""The points of a comparison: what the lists of the command line combine to."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import click

from treeattn.backends.cuda.device import Cuda
from treeattn.backends.device import Device
from treeattn.cli.options import choices
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import gpu_reducers, reducers
from treeattn.errors import ArgumentError, TransportError
from treeattn.selection import CATALOG, select
from treeattn.study.compare.schema import NULL, SUM, WIRE_BYTES, Key, Place, members
from treeattn.study.compare.steps import shape_of
from treeattn.study.compare.sweep import Way, keys


def transports_of(world: MpiCommunicator, device: Device, wanted: str | None) -> tuple[str, ...]:
    """Choose the transports to compare. Collective; raises `ArgumentError` or `TransportError` on all ranks.

    From GPUs "all", or None, are those that serve here: rank 0 says which do not, and why.
    """
    if not isinstance(device, Cuda):
        return _chosen("--transport", wanted or "mpi", ("mpi",))
    problems = gpu_reducers.problems(world, device.runtime)
    chosen = _chosen("--transport", wanted or "all", ("all", *problems))
    if "all" not in chosen:
        for name in chosen:
            if problem := problems[name]:
                raise TransportError(problem)
        return chosen
    for name, problem in problems.items():
        if problem and world.rank == 0:
            click.echo(f"left out transport {name}: {problem}", err=True)
    return tuple(name for name, problem in problems.items() if not problem)


def _chosen(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    try:
        return choices(known)(text)
    except ArgumentError as error:
        raise ArgumentError(f"{option} {error}") from None


def points(
    nodes: Sequence[int],
    schemes: Sequence[str | Schedule] | None,
    lists: Mapping[str, Any],
    device: str,
    over: Sequence[str],
) -> list[Key]:
    """Make every point of the sweep, of all schemes for None. Raises `ArgumentError` or `ScheduleError`.

    nodes: of each rank of the job, its node. lists: option -> its values, None for what was not said.
    """
    given = dict(lists)
    radix, chunks, executors = (given.pop(name) for name in ("radix", "chunks", "executor"))
    sizes, per_node, ranks = (given.pop(name) for name in ("bytes", "ranks_per_node", "ranks"))
    if executors is not None and device != "cpu":
        raise ArgumentError(
            f"--executor {','.join(executors)} is for --device cpu: GPUs have transports to choose from"
        )
    if device == "cuda" and "bfloat16" in given["wire"]:
        raise ArgumentError("--wire 'bfloat16' is unknown to GPUs: choose from float32")
    place: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
    given |= {"tokens": given.pop("seq_len"), "kv_heads": given["kv_heads"] or [0]}
    if sizes and given["what"] not in (None, ("reduce",)):
        raise ArgumentError("--bytes is of reductions: leave out --what, or say --what reduce")
    if sizes and given["heads"]:
        raise ArgumentError("--bytes says how many heads there are: leave out --heads")
    given["what"] = given["what"] or (("reduce",) if sizes else ("reduce", "decode"))
    given["heads"] = given["heads"] or [16]
    expanded = _expanded(
        schemes or [name for name, row in CATALOG.items() if set(over) & set(row.transports)],
        {"radix": radix, "chunks": chunks},
    )
    chosen = {scheme if isinstance(scheme, str) else scheme.name: scheme for scheme in expanded}
    found = [
        key
        for used, of_node in _places(nodes, ranks, per_node or (None,))
        for lists_of_size in (_of_bytes(given, sizes) if sizes else [given])
        for key in keys(
            list(chosen),
            lambda name: _ways(chosen[name], place, over, executors or (None,)),
            ranks=[used],
            ranks_per_node=[of_node],
            **lists_of_size,
        )
    ]
    for key in found:
        shape_of(key)
    return [key for key in dict.fromkeys(found) if schemes is not None or _may_run(key)]


def _places(
    nodes: Sequence[int], ranks: Sequence[int] | None, per_node: Sequence[int | None]
) -> Iterator[Place]:
    """Every choice of ranks. Raises `ArgumentError` for more than there are."""
    for most in per_node:
        if most is not None and most > max(Counter(nodes).values()):
            raise ArgumentError(
                f"--ranks-per-node {most}: no node of this job has so many; start it with more"
            )
        there = len(members(nodes, (len(nodes), most)))
        for count in sorted(ranks or [there]):
            if count > there:
                raise ArgumentError(f"--ranks {count}: this job has {there} ranks; start it with more")
            yield count, most


def _of_bytes(given: Mapping[str, Any], sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The lists of each size: as many heads as come nearest, or one of fewer elements where it is less than
    one; for each type of records of its own."""
    for dtype, wire, batch, queries, head_dim, size in itertools.product(
        *(given[name] for name in ("dtype", "wire", "batch", "queries", "head_dim")), sizes
    ):
        elements = size / (8 if dtype == "float64" else WIRE_BYTES[wire]) / (batch * queries)
        heads = round(elements / (head_dim + 2))
        dim = head_dim if heads else max(8, 8 * round((elements - 2) / 8))  # what shapes may have
        one = {"dtype": dtype, "wire": wire, "batch": batch, "queries": queries}
        one |= {"heads": max(heads, 1), "head_dim": dim}
        yield {**given, **{name: [value] for name, value in one.items()}}


def _ways(
    scheme: str | Schedule, device: Literal["cpu", "cuda"], over: Sequence[str], executors: Sequence[Any]
) -> list[Way]:
    """List the ways of a scheme among what is compared. Raises where there is none."""
    if scheme == NULL:
        return [Way(device, "mpi" if device == "cpu" else "none")]
    if scheme == SUM:
        return [Way(device, name) for name in over if name in ("mpi", "host", "nccl", "cuda-mpi")]
    row = select(scheme).row
    serving = [name for name in over if name in row.transports]
    if not serving:  # raises, with what would serve
        reducers.choose(device, over[0], row, 2)
    return [Way(device, name, who) for name in serving for who in ((None,) if row.module else executors)]


def _may_run(key: Key) -> bool:
    """Whether ``all`` has a scheme. Library calls and scattered schedules have no bfloat16 records, and the
    merge that an MPI library calls has float32 alone."""
    if key.wire == "float32" or key.scheme in (SUM, NULL):
        return True
    row = select(key.scheme).row
    return row.kind != "library" if key.wire == "float64" else row.kind == "schedule" and not row.scattered


def _expanded(
    chosen: Sequence[str | Schedule], parameters: Mapping[str, Sequence[int] | None]
) -> list[str | Schedule]:
    """Spell schemes once for each radix and chunks where they take such; the sum and null first."""
    for parameter, values in parameters.items():
        if values is not None:
            chosen = [variant for name in chosen for variant in _variants(name, parameter, values)]
    return list(dict.fromkeys([NULL, SUM, *chosen]))


def _variants(scheme: str | Schedule, parameter: str, values: Sequence[int]) -> list[str | Schedule]:
    selection = select(scheme)
    if selection.row.parameter(parameter) is None or parameter in dict(selection.given):
        return [scheme]
    return [select(f"{scheme}:{parameter}={value}").text for value in values]
