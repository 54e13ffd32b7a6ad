"""``treeattn compare``: schemes measured side by side, in a way that others may check."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from treeattn import comm as comm_
from treeattn import files
from treeattn.attention.shape import DTYPES
from treeattn.cli import compare_table
from treeattn.cli.compare_points import points, transports_of
from treeattn.cli.console import WIDE, Lines, console
from treeattn.cli.own_device import own_device
from treeattn.cli.scheme import given
from treeattn.collectives import nccl
from treeattn.decoder.device import Cuda
from treeattn.errors import ArgumentError, TreeattnError
from treeattn.study import environment
from treeattn.study.compare import prediction, results
from treeattn.study.compare.clock import Clock
from treeattn.study.compare.measure import Effort
from treeattn.study.compare.prediction import Predictions
from treeattn.study.compare.schema import FORMAT, Failure, Key, Point, Run
from treeattn.study.compare.sweep import Block, Sweep

__all__ = ["command"]

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _lists(name: str, default: str | None, words: str | None = None, one: str = "N") -> _Decorator:
    """An option that takes a list, of which every element makes cases."""
    metavar = f"{one}[,{one}..]"
    return click.option(f"--{name}", default=default, show_default=bool(default), metavar=metavar, help=words)


@click.command("compare")
@_lists("schemes", "all", "Scheme strings, such as k_nomial_tree:radix=4; FILE.json; all.", "S")
@_lists("what", "reduce,decode", "reduce: the reduction alone; decode: the whole step.", "W")
@_lists("seq-len", "4096,65536", "Tokens over all ranks; k = 1000, Ki = 1024.")
@_lists("ranks", None, "The first N ranks; default all.")
@_lists("batch", "1")
@_lists("queries", "1")
@_lists("heads", "16")
@_lists("kv-heads", None, "Default as many as heads.")
@_lists("head-dim", "128")
@_lists("dtype", "bfloat16", f"Of q, k and v: {', '.join(DTYPES)}.", "D")
@_lists("wire", "float32", "Records under way: float32, or bfloat16 (schedules only).", "W")
@_lists("skew", "0", "Ranks enter up to so much late, at random: 0, 100us, 1ms.", "T")
@_lists("radix", None, "Each scheme that has a radix, with each of these.")
@_lists("chunks", None, "Likewise for chunks.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--transport", default=None, metavar="T[,T..]|all",
              help="From GPUs: host, nccl, peer, cuda-mpi; default all that are there.")  # fmt: skip
@_lists("executor", None, "Who runs schedules: slots, program, mpi; default the best that there is.", "E")
@click.option("--cluster", metavar="NAME|FILE.toml",
              help="Predict times on it, beside; default TREEATTN_CLUSTER if that is set.")  # fmt: skip
@click.option("--repetitions", type=click.IntRange(1, 10_000), default=10, show_default=True,
              help="Blocks of each point: planned anew, in a new random order.")  # fmt: skip
@click.option("--iterations", type=click.IntRange(3, 1_000_000), default=200, show_default=True,
              help="Most iterations of a block.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=0.3, show_default=True,
              help="About so long for all blocks of a point; at least 3 iterations each.")  # fmt: skip
@click.option("--patience", type=click.FloatRange(0, min_open=True), default=6.0, show_default=True,
              help="Seconds after which a point gets no further block.")  # fmt: skip
@click.option("--launch", type=click.IntRange(1), default=1, show_default=True,
              help="Number of this job; jobs of different numbers add up in one file.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path),
              help="Append to this file of JSON lines; what it holds is not measured again.")  # fmt: skip
@WIDE
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the summaries of this command."
)
def command(
    schemes: str,
    out: Path | None,
    wide: bool,
    json_path: Path | None,
    repetitions: int,
    iterations: int,
    seconds: float,
    patience: float,
    launch: int,
    seed: int,
    device: str,
    transport: str | None,
    cluster: str | None,
    **lists: str | None,
) -> int:
    """Measure schemes against each other: cold and warm, with intervals, errors, payload and memory.

    Lists make every combination. Beside the schemes, each case has MPI_Allreduce(SUM) of the same bytes and a
    reduction that does nothing (the harness's own cost). From GPUs schemes are measured over each transport,
    and the sum is that of its own library. Every column is derived in docs/measuring.md. Exit
    code 1: a scheme could not run somewhere, a result missed its bound or differed between ranks, or the file
    holds results of another version, to which these do not add. Lines of it that cannot be used are named.
    """
    if not math.isfinite(seconds + patience):
        raise ArgumentError("--seconds and --patience take a number of seconds; for no limit a large one")
    world = comm_.world()
    named = None if schemes == "all" else given(world, schemes, on_all=False)
    effort = Effort(repetitions, iterations, seconds, patience)
    options = {"schemes": schemes, **lists, **asdict(effort), "launch": launch, "seed": seed}
    options |= {"device": device, "transport": transport, "cluster": cluster}
    comm_.agree(world, {"the command line": (options, str(out))})
    where, shared = own_device(world, device)
    over = transports_of(world, where, transport)
    plan = comm_.together(world, lambda: points(world.size, named, lists, device, over))
    predictions = prediction.predictions(world, cluster, plan)
    job = environment.job(Clock(world), options, used=max(key.ranks for key in plan))
    if predictions.shown:
        job["options"]["predicted_on"] = predictions.shown
    if "nccl" in over:
        job["options"]["nccl"] = ".".join(map(str, nccl.version()))
    if isinstance(where, Cuda):
        job["warning"] = "; ".join(filter(None, (job["warning"], shared))) or None
        for rank, name in zip(job["ranks"], world.allgather(where.runtime.name), strict=True):
            rank["gpu"] = name
    line = msgspec.convert({"kind": "run", "format": FORMAT, "run": results.run_id(), **job}, Run)
    with closing(_Session(world, out, json_path, line, plan, effort, launch, predictions)) as session:
        for block, found in Sweep(plan, effort, launch, seed, session.done).run(world):
            session.take(block, found)
        return int(world.bcast(comm_.together(world, lambda: session.report(wide))))


class _Session:
    """Rank 0's part: the file, what is in it, what people see. Other ranks hold one that does nothing."""

    def __init__(
        self,
        world: Any,
        out: Path | None,
        json_path: Path | None,
        line: Run,
        plan: list[Key],
        effort: Effort,
        launch: int,
        predictions: Predictions,
    ) -> None:
        self._line, self._launch, self._plan, self._out = line, launch, plan, out
        self._rank_0, self._predictions = world.rank == 0, predictions
        self._writer: results.Writer | None = None
        comm_.together(world, lambda: self._open(json_path) if self._rank_0 else None)
        if out is not None:  # on every rank: one that is not within an MPI call tells it
            files.kept.append(f"{out} (the same command goes on from there)")
        self._held = self._writer.held if self._writer else results.Results()
        self.done = world.bcast(self._done())
        self._announced = False
        self._mixed = results.mixed_versions([*self._held.used(), *((line, key.ranks) for key in plan)])
        self._problems = self._named_problems()
        self._held.runs[line.run] = line
        self._errors: dict[Key, str] = {}
        self._measured, self._began, self._say = 0, time.monotonic(), Lines(self._rank_0)
        self._todo = self._said_first(effort)

    def _open(self, json_path: Path | None) -> None:
        self._write_json = files.output_writer(json_path)
        files.check_distinct([self._out, json_path])
        self._writer = results.Writer(self._out) if self._out is not None else None

    def _said_first(self, effort: Effort) -> int:
        """How many blocks there are to measure, after saying so."""
        planned = {Block(key, repetition) for key in self._plan for repetition in range(effort.repetitions)}
        known, cases = len(planned & self.done.keys()), len({key.case for key in self._plan})
        schemes = len(self._plan) // max(cases, 1)  # over each transport
        text = f"{len(self._plan)} points ({schemes} schemes in {cases} cases), {len(planned)} blocks"
        again = f"; {known} are in the file already and are not measured again"
        if self._rank_0:
            click.echo(text + again * bool(known), err=True)
        return len(planned) - known

    def _named_problems(self) -> list[str]:
        """What is wrong with the file, said at once."""
        known = results.mixed_versions(self._held.used())
        problems = [problem for problem in self._held.problems if problem != known]
        problems += [self._mixed] if self._mixed else []
        for problem in problems:
            click.echo(f"treeattn: warning: {problem}", err=True)
        return problems

    def _done(self) -> dict[Block, float]:
        """Blocks of this launch that the file holds from runs of the same version, and what each took."""
        return {
            Block(point.key, point.repetition): point.took
            for point in self._held.points
            if point.launch == self._launch and self._held.version(point) == self._version(point.key)
        }

    def _version(self, key: Key) -> str:
        return results.version(self._line, key.ranks)

    def take(self, block: Block, found: dict[str, Any] | TreeattnError | None) -> None:
        """A block that begins, what was measured in it, or why its scheme cannot run."""
        if found is None:
            self._say_how_far(block)
        elif isinstance(found, TreeattnError):
            self._errors[block.key] = str(found)
            self._append(Failure(**self._fields(block.key), message=str(found)))
        else:
            predicted = self._predictions.times.get(block.key)
            fields = self._fields(block.key) | {"predicted": predicted}
            point = Point(**fields, repetition=block.repetition, **found)
            self._append(point)
            self._held.points.append(point)
            self._measured += 1

    def _say_how_far(self, block: Block) -> None:
        left = (time.monotonic() - self._began) / max(self._measured, 1) * (self._todo - self._measured)
        done = f"{self._measured:,} of {self._todo:,} blocks are done, at most {left:,.0f} s are left"
        self._say(f"{block.key.what} {block.key.label}: {done}")

    def _fields(self, key: Key) -> dict[str, Any]:
        return {"format": FORMAT, "run": self._line.run, "key": key, "launch": self._launch}

    def _append(self, line: Point | Failure) -> None:
        """Write a line, before the first one the run's own: a run that finds all done leaves nothing."""
        if self._writer is None:
            return
        if not self._announced:
            self._writer.append(self._line)
            self._announced = True
        self._writer.append(line)

    def report(self, wide: bool) -> int:
        """Print the tables, write the summaries; the exit code, on rank 0."""
        if not self._rank_0:
            return 0
        place = {key: index for index, key in enumerate(self._plan)}
        summaries = [
            summary
            for summary in results.summarise(self._held)
            if summary.key in place and summary.version == self._version(summary.key)
        ]
        for summary in summaries:  # those of this command, also where an older one measured
            summary.facts["predicted"] = self._predictions.times.get(summary.key)
        summaries.sort(key=lambda summary: place[summary.key])
        facts = {
            "run": self._line,
            "summaries": summaries,
            "errors": [{"key": key, "message": text} for key, text in self._errors.items()],
            "problems": self._problems,
        }
        self._write_json(environment.as_json(msgspec.to_builtins(facts)))
        screen = console(wide)
        passed = compare_table.show(screen, self._line, summaries, self._errors, wide)
        if shown := self._predictions.shown:
            screen.print(f"predicted: on {shown}")
        return 0 if passed and not self._errors and not self._mixed else 1

    def close(self) -> None:
        """Give the file free."""
        if self._writer is not None:
            self._writer.close()
