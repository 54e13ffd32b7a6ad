"""``treeattn compare``: schemes measured side by side, in a way that others may check."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from treeattn import files
from treeattn.attention.shape import DTYPES
from treeattn.cli import compare_table, options
from treeattn.cli.options import Output, choices, numbers
from treeattn.cli.scheme import given
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import reducers
from treeattn.errors import ArgumentError, MissingPackageError, TransportError, TreeattnError
from treeattn.mpi import topology
from treeattn.mpi.communicators import MpiCommunicator, broadcast_from_root, collectively
from treeattn.report import Progress, Report
from treeattn.selection import CATALOG, select
from treeattn.study import environment, extra
from treeattn.study.compare.measure import Block, Budget, sweep
from treeattn.study.compare.rows import SUM, Key, Row, Writer, run_name, version
from treeattn.study.compare.steps import shape_of
from treeattn.study.compare.summary import summarise

if TYPE_CHECKING:
    from treeattn.study.intervals import Estimate

SECONDS = 0.3  # about so long for all blocks of a key; longer for 20 iterations in each
PATIENCE = 10.0  # seconds after which a key gets no further block


def _numbers(
    name: str, default: str | None, words: str = ""
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """An option that takes a list of numbers, of which each makes cases."""
    return click.option(
        f"--{name}", callback=options.read(numbers), default=default, metavar="N[,N..]", help=words
    )


@click.command("compare")
@click.option("--schemes", default="all", metavar="S[,S..]",
              help="Scheme strings, such as k_nomial_tree:radix=4; FILE.json; all.")  # fmt: skip
@_numbers("seq-len", None, "Whole steps with so many tokens over all ranks; k = 1000, Ki = 1024.")
@_numbers("bytes", None, "The reduction alone, of so many bytes: of as many heads as make them.")
@_numbers("batch", "1")
@_numbers("queries", "1")
@_numbers("heads", None, "Of whole steps; default 16.")
@_numbers("kv-heads", None, "Default as many as heads.")
@_numbers("head-dim", None, "Default 128; with --bytes 126, which makes records of 512 bytes.")
@click.option("--dtype", callback=options.read(choices(DTYPES)), default="bfloat16", metavar="D[,D..]",
              help=f"Of q, k and v: {', '.join(DTYPES)}.")  # fmt: skip
@options.DEVICE
@click.option("--transport", metavar="T[,T..]",
              help="From GPUs: host, nccl, peer, cuda-mpi; default all that are there.")  # fmt: skip
@options.CLUSTER
@click.option("--repetitions", type=click.IntRange(1, 10_000), default=11,
              help="Blocks of each point, with those that the file holds.")  # fmt: skip
@click.option("--library-algorithm", metavar="NAME",
              help="Of the library's sum, NCCL's as ring/ll; by jobs/library_algorithm.sbatch.")  # fmt: skip
@options.output_options("Append to this file of JSON lines; what it holds is not measured again.",
                        json="Write the summaries of this command.")  # fmt: skip
def command(
    schemes: str,
    device: str,
    transport: str | None,
    cluster: str | None,
    repetitions: int,
    library_algorithm: str | None,
    output: Output,
    **lists: Sequence[Any] | None,
) -> int:
    """Measure schemes against each other, whole steps and the reduction alone, and say which is faster.

    Lists make every combination; numbers also as FIRST:LAST:xFACTOR, such as 8:1Mi:x2. Without --seq-len and
    --bytes: steps with 4096 and 65536 tokens, and reductions of 8 KiB. Besides the schemes, each case has
    MPI_Allreduce(SUM) of the same bytes; from GPUs the sum of each transport's own library. --cluster
    adds predicted times. The same command again with more --repetitions adds blocks of another run.
    --library-algorithm measures the sum by this algorithm of the library beside its default, and of all
    schemes recursive_doubling.
    docs/measuring.md says what is timed. Exit code 1: a scheme could not run, or a result is wrong."""
    world = options.world()
    if library_algorithm is not None:
        by_nccl = "/" in library_algorithm
        if (device, transport) != (("cuda", "nccl") if by_nccl else ("cpu", transport)) or world.size < 2:
            raise ArgumentError(
                "--library-algorithm is of 2 ranks or more: NAME of MPI's sum with --device cpu, or "
                "ALGORITHM/PROTOCOL of NCCL's with --device cuda --transport nccl"
            )
        from treeattn.study.compare.sum_algorithm import sum_algorithm  # few ask for one

        collectively(world, lambda: sum_algorithm(library_algorithm))
        schemes = "recursive_doubling" if schemes == "all" else schemes
    named = None if schemes == "all" else given(world, schemes, on_all=False)
    user_schedules = {scheme.name: scheme for scheme in named or () if isinstance(scheme, Schedule)}
    where, shared = options.own_device(world, device)
    over = _transports(world, where, transport)
    keys = collectively(world, lambda: list(_keys(world.size, device, named, library_algorithm, over, lists)))
    named_cluster = broadcast_from_root(world, lambda: topology.described(cluster), "the cluster of rank 0")
    foretold: Mapping[Key, Estimate] = {}
    foretold_on = ""
    if named_cluster is not None:
        from treeattn.study.compare import prediction  # loads the simulator

        foretold, foretold_on = prediction.predictions(world, named_cluster, keys, user_schedules)
    job = _job(world, where, shared)
    output.open(world=world)
    at_root = output.out if world.rank == 0 else None
    writer = collectively(world, lambda: None if at_root is None else Writer(at_root))
    if output.out is not None:  # on every rank: one that is not within an MPI call names it
        files.kept.append(f"{output.out} (the same command goes on from there)")
    held = writer.held if writer else []
    mine = version(Row(**structs.asdict(keys[0]), **job))
    by = {row.run: row.algorithm for row in held if row.algorithm}
    rows = [row for row in held if version(row) == mine and by.get(row.run) == library_algorithm]
    others = len(held) - len(rows)
    done = world.bcast({Block(row.key, row.repetition): row.took_us for row in rows if row.error is None})
    if world.rank == 0:
        points = f"{len(keys)} points in {len({key.case for key in keys})} cases"
        planned = {Block(key, repetition) for key in keys for repetition in range(repetitions)}
        known = len(planned & done.keys())
        again = f"; {known} are in the file already and are not measured again" if known else ""
        click.echo(f"{points}, {len(planned)} blocks{again}", err=True)
    budget = Budget(repetitions, seconds=SECONDS, patience=PATIENCE)
    errors: dict[Key, str] = {}
    try:
        for block, result in sweep(world, keys, budget, done, user_schedules, Progress(world.rank == 0)):
            found = result if isinstance(result, dict) else {"error": str(result)}
            if isinstance(result, TreeattnError):
                errors[block.key] = str(result)
            estimate, schedule = foretold.get(block.key), user_schedules.get(block.key.scheme)
            if estimate is not None:
                found |= {"predicted_us": estimate.time, "predicted_low_us": estimate.low,
                          "predicted_high_us": estimate.high}  # fmt: skip
            if schedule is not None:
                found["schedule"] = schedule.to_json()
            rows.append(Row(**structs.asdict(block.key), **job, repetition=block.repetition, **found))
            if writer is not None:
                writer.append(rows[-1])
        asked = set(keys)
        here = [row for row in rows if row.key in asked]
        report = functools.partial(_report, job, here, errors, foretold_on, others, output)
        return broadcast_from_root(world, report, "the report of rank 0")
    finally:
        if writer is not None:
            writer.close()


def _report(
    job: dict[str, Any],
    rows: Sequence[Row],
    errors: Mapping[Key, str],
    predicted_on: str,
    others: int,
    output: Output,
) -> int:
    """Print the tables, write the summaries; the exit code. others: rows of the file that have no part."""
    note = None
    try:
        extra("scipy.stats")
    except MissingPackageError as error:
        note = f"medians only: {error}"
    summaries = summarise(rows, tested=note is None)
    facts = {"headlines": compare_table.headlines(summaries), "errors": [*errors.values()]}
    made = Report({**job, "summaries": summaries, **facts})
    passed = compare_table.show(made, summaries, errors)
    made.note(note)
    if predicted_on:
        made.line(f"predicted: on {predicted_on}")
    if others:
        made.note(f"{others} rows of the file are of another version or algorithm, and are kept apart")
    made.note(job["warning"])
    output.report(made)
    return 0 if passed and not errors else 1


def _transports(world: MpiCommunicator, device: Any, wanted: str | None) -> tuple[str, ...]:
    """The transports of the ranks' device; by default all that serve here: rank 0 says which do not, and why.
    Collective; raises `ArgumentError` or `TransportError` on all ranks."""
    if device.name == "cpu":
        problems: Mapping[str, str | None] = {"mpi": None}
    else:
        from treeattn.decoder import gpu_reducers

        problems = gpu_reducers.problems(world, device.runtime)
    try:
        chosen = choices(problems)(wanted or ",".join(problems))
    except ArgumentError as error:
        raise ArgumentError(f"--transport {error}") from None
    for name in chosen:
        if (problem := problems[name]) and wanted:
            raise TransportError(problem)
        if problem and world.rank == 0:
            click.echo(f"left out transport {name}: {problem}", err=True)
    return tuple(name for name in chosen if not problems[name])


def _keys(
    ranks: int,
    device: str,
    schemes: Sequence[str | Schedule] | None,
    algorithm: str | None,
    over: Sequence[str],
    lists: Mapping[str, Any],
) -> Iterator[Key]:
    """Everything that is measured, case by case, of all schemes for None. Raises `ArgumentError` or
    `ScheduleError`."""
    chosen = schemes or [name for name, row in CATALOG.items() if set(over) & set(row.transports)]
    rows = {one if isinstance(one, str) else one.name: select(one).row for one in chosen}
    for row in rows.values():
        if not set(over) & set(row.transports):  # raises, with what would serve
            reducers.candidates(device, over[0], row, 2)
    tokens, sizes = lists["seq_len"], lists["bytes"]
    if not tokens and not sizes:
        tokens, sizes = (4096, 65536), (8192,)
    if not tokens and (lists["heads"] or lists["kv_heads"]):
        raise ArgumentError("--heads, --kv-heads are of whole steps: --bytes says how many a reduction has")
    rings = [name for name, row in rows.items() if row.fused and schemes]
    if rings and not tokens:
        raise ArgumentError(f"{', '.join(rings)}: attends while it communicates: give --seq-len")
    shared = lists["dtype"], lists["batch"], lists["queries"]
    widths = lists["head_dim"] or [126], lists["head_dim"] or [128]
    cases: list[tuple[Any, ...]] = []
    for size, dtype, batch, queries, head_dim in itertools.product(sizes or (), *shared, widths[0]):
        heads, dim = _shape_of_bytes(size / (8 if dtype == "float64" else 4) / (batch * queries), head_dim)
        cases.append(("reduce", 0, batch, queries, heads, heads, dim, dtype))
    for length, dtype, batch, queries, head_dim in itertools.product(tokens or (), *shared, widths[1]):
        for heads, kv_heads in itertools.product(lists["heads"] or [16], lists["kv_heads"] or [0]):
            cases.append(("decode", length, batch, queries, heads, kv_heads or heads, head_dim, dtype))
    for what, *shape in dict.fromkeys(cases):
        for name in (SUM, *([f"{SUM}/{algorithm}"] if algorithm else ()), *rows):
            scheme = rows.get(name)  # None: a library's sum
            served = scheme.transports if scheme else ("mpi", "host", "nccl", "cuda-mpi")
            fused = scheme and scheme.fused  # attends while it communicates
            no_float64 = scheme and scheme.kind == "library" and shape[-1] == "float64"
            if (what == "reduce" and fused) or (schemes is None and no_float64):
                continue
            for transport in over:
                if transport in served:
                    key = Key(*(what, name, ranks, *shape, device, transport))
                    shape_of(key)
                    yield key


def _shape_of_bytes(elements: float, head_dim: int) -> tuple[int, int]:
    """As many heads as come nearest, or one of fewer elements where that is less than one."""
    heads = round(elements / (head_dim + 2)) if elements >= head_dim + 2 else 0
    return (heads, head_dim) if heads else (1, max(6, 8 * round(elements / 8) - 2))


def _job(world: MpiCommunicator, device: Any, shared: str | None) -> dict[str, Any]:
    """The columns of a `Row` that are the same in all of this run. Collective."""
    machine = environment.machine(world)
    ranks, software = machine["ranks"], world.bcast(machine["software"])
    processors: Any = [rank["cpu"] for rank in ranks]
    if device.name == "cuda":
        processors = world.allgather(device.runtime.name)
    return {
        "run": world.bcast(run_name()),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "treeattn": software["packages"]["treeattn"],
        "commit": software["git"],
        "mpi": " ".join(software["mpi"].split()),
        "processor": " and ".join(sorted(set(processors))),
        "nodes": [rank["node"] for rank in ranks],
        "hosts": ",".join(dict.fromkeys(rank["host"] for rank in ranks)),
        "environment": environment.variables(),
        "command": " ".join(software["command"]),
        "warning": "; ".join(filter(None, (machine["warning"], shared))) or None,
    }
