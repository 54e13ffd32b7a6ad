"""``treeattn compare``: schemes measured side by side, in a way that others may check."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from treeattn import communicators, files
from treeattn.agreement import broadcast_from_root, collectively
from treeattn.attention.shape import DTYPES
from treeattn.backends.cuda.device import Cuda
from treeattn.cli import compare_points, compare_table, options
from treeattn.cli.options import Output, choices, numbers
from treeattn.cli.own_device import own_device
from treeattn.cli.scheme import given
from treeattn.collectives.clusters import disturbance
from treeattn.collectives.clusters.disturbance import TOGETHER
from treeattn.collectives.runtime import nccl
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.request import MPI_EXECUTORS
from treeattn.errors import ArgumentError, TreeattnError
from treeattn.report import Progress, Report
from treeattn.study import environment
from treeattn.study.compare import prediction, results
from treeattn.study.compare.clock import Clock
from treeattn.study.compare.measure import Effort
from treeattn.study.compare.prediction import Predictions
from treeattn.study.compare.schema import FORMAT, Failure, Key, Point, Run
from treeattn.study.compare.sweep import Block, Sweep

_Decorator = Callable[[Callable[..., int]], Callable[..., int]]


def _lists(
    name: str, reader: Callable[[str], object], default: str | None, words: str = "", one: str = "N"
) -> _Decorator:
    """Make an option that takes a list, of which every element makes cases."""
    metavar = f"{one}[,{one}..]"
    return click.option(
        f"--{name}", callback=options.read(reader), default=default, metavar=metavar, help=words
    )


_effort_options = options.grouped(
    "effort", Effort,
    click.option("--repetitions", type=click.IntRange(1, 10_000), default=10,
                 help="Blocks of each point: planned anew, in a new random order."),
    click.option("--iterations", type=click.IntRange(3, 1_000_000), default=200,
                 help="Most iterations of a block."),
    click.option("--seconds", type=click.FloatRange(0, min_open=True), default=0.3,
                 help="About so long for all blocks of a point; longer for 20 iterations each."),
    click.option("--warmup", type=click.IntRange(1, 100_000),
                 help="Untimed calls before those of a block.  [5 of a reduction, 1 of a step]"),
    click.option("--stop-early", is_flag=True, help="No further block of a scheme that has a verdict after "
                 "8, 16, 32 .. of them; verdicts pay for the looks."),
    click.option("--patience", type=click.FloatRange(0, min_open=True), default=10.0,
                 help="Seconds after which a point gets no further block."),
)  # fmt: skip


@click.command("compare")
@click.option("--schemes", default="all", metavar="S[,S..]",
              help="Scheme strings, such as k_nomial_tree:radix=4; FILE.json; all.")  # fmt: skip
@_lists("what", choices(("reduce", "decode")), None,
        "reduce: the reduction alone; decode: the whole step; default both.", "W")  # fmt: skip
@_lists("seq-len", numbers, "4096,65536", "Tokens over all ranks; k = 1000, Ki = 1024.")
@_lists("ranks", numbers, None, "The first N ranks; default all.")
@_lists("ranks-per-node", numbers, None, "Of each node the first N ranks; default all.")
@click.option("--bytes", "--sizes", "bytes", callback=options.read(numbers), metavar="B[,B..]",
              help="Reductions of records of about B bytes, as 8:1Mi:x2 says: of as many heads.")  # fmt: skip
@_lists("batch", numbers, "1")
@_lists("queries", numbers, "1")
@_lists("heads", numbers, None, "Default 16.")
@_lists("kv-heads", numbers, None, "Default as many as heads.")
@_lists("head-dim", numbers, "128")
@_lists("dtype", choices(DTYPES), "bfloat16", f"Of q, k and v: {', '.join(DTYPES)}.", "D")
@_lists("wire", choices(("float32", "bfloat16")), "float32",
        "Records under way: float32, or bfloat16 (schedules only).", "W")  # fmt: skip
@click.option("--arrivals", default=TOGETHER.text, metavar="A[,A..]",
              help="When ranks enter: together; random, exponential, ascending, late:1ms; FILE.")  # fmt: skip
@_lists("radix", numbers, None, "Each scheme that has a radix, with each of these.")
@_lists("chunks", numbers, None, "Likewise for chunks.")
@options.DEVICE
@click.option("--transport", metavar="T[,T..]|all",
              help="From GPUs: host, nccl, peer, cuda-mpi; default all that are there.")  # fmt: skip
@_lists(
    "executor",
    choices(MPI_EXECUTORS),
    None,
    f"Who runs schedules: {', '.join(MPI_EXECUTORS)}; default the best.",
    "E",
)
@options.CLUSTER
@_effort_options
@click.option(
    "--baseline", metavar="S", help="Say which schemes are faster than this one.  [the library's sum]"
)
@click.option("--launch", type=options.COUNT, default=1,
              help="Number of this job; jobs of different numbers add up in one file.")  # fmt: skip
@click.option("--seed", type=options.SEED, default=0)
@options.output_options("Append to this file of JSON lines; what it holds is not measured again.",
                        json="Write the summaries of this command.")  # fmt: skip
def command(
    schemes: str,
    arrivals: str,
    device: str,
    transport: str | None,
    cluster: str | None,
    effort: Effort,
    baseline: str | None,
    launch: int,
    seed: int,
    output: Output,
    **lists: list[Any] | None,
) -> int:
    """Measure schemes against each other: cold and warm, with intervals, errors, payload and memory.

    Lists make every combination; numbers also as FIRST:LAST:xFACTOR, such as 8:1Mi:x2. Beside the schemes,
    each case has MPI_Allreduce(SUM) of the same bytes and a reduction that does nothing (the harness's own
    cost). From GPUs schemes are measured over each transport, and the sum is that of its own library. Every
    column is derived in docs/measuring.md. --cluster predicts times beside. Exit code 1: a scheme could not
    run somewhere, a result missed its bound or differed between ranks, or the file holds results of another
    version, to which these do not add. Lines of it that cannot be used are named.
    """
    if not math.isfinite(effort.seconds + effort.patience):
        raise ArgumentError("--seconds and --patience take a number of seconds; for no limit a large one")
    world = options.world()
    named = None if schemes == "all" else given(world, schemes, on_all=False)
    own = {scheme.name: scheme for scheme in named or () if isinstance(scheme, Schedule)}
    read = broadcast_from_root(
        world,
        lambda: [disturbance.arrivals(part.strip()) for part in arrivals.split(",")],
        "what rank 0 reads of --arrivals",
    )
    enter = {one.text: one for one in read}
    lists["arrivals"] = list(enter)
    where, shared = own_device(world, device)
    over = compare_points.transports_of(world, where, transport)
    groups = communicators.node_groups(world)
    nodes = [next(n for n, ranks in enumerate(groups) if rank in ranks) for rank in range(world.size)]
    plan = collectively(world, lambda: compare_points.points(nodes, named, lists, device, over))
    for key in plan:
        enter[key.arrivals].check(key.ranks)
    if baseline is not None and baseline not in {key.label for key in plan}:
        raise ArgumentError(f"--baseline {baseline}: is not among what is measured; add it to --schemes")
    predictions = prediction.predictions(world, cluster, plan, own, baseline, enter)
    said: dict[str, Any] = {
        name: None if value is None else ",".join(map(str, value)) for name, value in lists.items()
    }
    said |= {"schemes": schemes, **asdict(effort), "launch": launch, "seed": seed}
    said |= {"device": device, "transport": transport, "cluster": cluster}
    job = environment.job(Clock(world), said, [key.place for key in plan])
    if predictions.shown:
        said["predicted_on"] = predictions.shown
    if "nccl" in over:
        said["nccl"] = ".".join(map(str, nccl.version()))
    if isinstance(where, Cuda):
        job["warning"] = "; ".join(filter(None, (job["warning"], shared))) or None
        for rank, name in zip(job["ranks"], world.allgather(where.runtime.name), strict=True):
            rank["gpu"] = name
    line = msgspec.convert({"kind": "run", "format": FORMAT, "run": results.run_id(), **job}, Run)
    output.open(world=world)
    with closing(_Session(world, output.out, line, launch, plan, predictions, own, baseline)) as session:
        session.announce(effort.repetitions)
        for block, found in Sweep(plan, effort, launch, seed, session.done, own, enter, session.answered).run(
            world
        ):
            session.take(block, found)
        return broadcast_from_root(world, lambda: session.report(output), "the report of rank 0")


class _Session:
    """Rank 0's part: the file, what is in it, and progress. Other ranks hold one that does nothing."""

    def __init__(
        self,
        world: MpiCommunicator,
        out: Path | None,
        line: Run,
        launch: int,
        plan: list[Key],
        predictions: Predictions,
        own: Mapping[str, Schedule],
        baseline: str | None,
    ) -> None:
        self._rank_0, self._line, self._launch = world.rank == 0, line, launch
        self._plan, self._predictions, self._own, self._baseline = plan, predictions, own, baseline
        path = out if self._rank_0 else None
        self._writer = collectively(world, lambda: None if path is None else results.Writer(path))
        if out is not None:  # on every rank: one that is not within an MPI call tells it
            files.kept.append(f"{out} (the same command goes on from there)")
        self._held = self._writer.held if self._writer else results.Results()
        self.done = broadcast_from_root(world, self._done, "what rank 0 finds in the file")
        self._mixed = results.mixed_versions([*self._held.used(), *((line, key.place) for key in plan)])
        known = results.mixed_versions(self._held.used())
        self._problems = [problem for problem in self._held.problems if problem != known]
        self._problems += [self._mixed] if self._mixed else []
        self._held.runs[line.run] = line
        self._errors: dict[Key, str] = {}
        self._written = False

    def _done(self) -> dict[Block, float]:
        """Blocks of this launch that the file holds from runs of the same version, and what each took."""
        return {
            Block(point.key, point.repetition): point.took
            for point in self._of_this_version()
            if point.launch == self._launch
        }

    def _of_this_version(self) -> list[Point]:
        held = self._held
        return [point for point in held.points if held.version(point) == self._version(point.key)]

    def _version(self, key: Key) -> str:
        return results.version(self._line, key.place)

    def announce(self, repetitions: int) -> None:
        """Say what is wrong with the file, and how many blocks there are to measure."""
        for problem in self._problems:
            click.echo(f"treeattn: warning: {problem}", err=True)
        planned = {Block(key, repetition) for key in self._plan for repetition in range(repetitions)}
        known, cases = len(planned & self.done.keys()), len({key.case for key in self._plan})
        schemes = len(self._plan) // max(cases, 1)  # over each transport
        text = f"{len(self._plan)} points ({schemes} schemes in {cases} cases), {len(planned)} blocks"
        if self._rank_0:
            again = f"; {known} are in the file already and are not measured again"
            click.echo(text + again * bool(known), err=True)
        self._todo, self._measured = len(planned) - known, 0
        self._began, self._say = time.monotonic(), Progress(self._rank_0)

    def take(self, block: Block, found: dict[str, Any] | TreeattnError | None) -> None:
        """Record a block that begins, what was measured in it, or why its scheme cannot run."""
        fields: dict[str, Any] = {
            "format": FORMAT,
            "run": self._line.run,
            "key": block.key,
            "launch": self._launch,
        }
        if found is None:
            self._say_how_far(block)
        elif isinstance(found, TreeattnError):
            self._errors[block.key] = str(found)
            self._append(Failure(**fields, message=str(found)))
        else:
            estimate = self._predictions.estimates.get(block.key)
            point = Point(**fields, estimate=estimate, repetition=block.repetition, **found)
            self._append(point)
            self._held.points.append(point)
            self._measured += 1

    def answered(self, case: set[Key]) -> set[Key]:
        """Of one case, what needs no further block."""
        points = [point for point in self._of_this_version() if point.key in case]
        return compare_table.answered(results.Results(self._held.runs, points), self._baseline)

    def _say_how_far(self, block: Block) -> None:
        left = (time.monotonic() - self._began) / max(self._measured, 1) * (self._todo - self._measured)
        done = f"{self._measured:,} of {self._todo:,} blocks are done, at most {left:,.0f} s are left"
        self._say(f"{block.key.what} {block.key.label}: {done}")

    def _append(self, line: Point | Failure) -> None:
        """Write a line, before the first one the run's own: a run that finds all done leaves nothing."""
        if self._writer is None:
            return
        if not self._written:
            self._writer.append(self._line)
            self._written = True
        self._writer.append(line)

    def report(self, output: Output) -> int:
        """Print the tables, write the summaries; the exit code."""
        place = {key: index for index, key in enumerate(self._plan)}
        summaries = [
            summary
            for summary in results.summarise(self._held)
            if summary.key in place and summary.version == self._version(summary.key)
        ]
        for summary in summaries:  # those of this command, also where an older one measured
            summary.facts["estimate"] = self._predictions.estimates.get(summary.key)
        summaries.sort(key=lambda summary: place[summary.key])
        for _, group in itertools.groupby(summaries, lambda summary: summary.key.case):
            compare_table.answer(group, self._held, self._baseline)
        errors = [{"key": key, "message": text} for key, text in self._errors.items()]
        facts = {"run": self._line, "summaries": summaries, "errors": errors, "problems": self._problems}
        made = Report(msgspec.to_builtins(facts))
        passed = compare_table.show(made, self._line, summaries, self._errors)
        if shown := self._predictions.shown:
            made.line(f"predicted: on {shown}")
        output.report(made)
        return 0 if passed and not self._errors and not self._mixed else 1

    def close(self) -> None:
        """Close the file, so that another run may append to it."""
        if self._writer is not None:
            self._writer.close()
