"""``treeattn decode``: one exact attention step over a cache in a file, on all ranks of the job."""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from treeattn import collectives, files, reference, report
from treeattn import comm as comm_
from treeattn.arguments import Shape, dtype_name
from treeattn.decode import Decoder
from treeattn.errors import ArgumentError, TreeattnError
from treeattn.shards import LAYOUTS, Layout, parse_layout

__all__ = ["command"]


@click.command("decode")
@click.argument("source", metavar="INPUT.safetensors", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Write out and lse to this safetensors file.")
@click.option("--scheme", "schemes", default="binary_tree", show_default=True, metavar="S[,S..]",
              help="How partials are reduced over ranks; several, to see them side by side.")  # fmt: skip
@click.option("--layout", default="contiguous", show_default=True, metavar="|".join(LAYOUTS),
              help="Which tokens go to which rank.")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--transport", default=None, help="How records travel; default the only sensible one.")
@click.option("--repeat", type=click.IntRange(1), default=10, show_default=True,
              help="Timed steps after the first one.")  # fmt: skip
@click.option("--check", is_flag=True, help="Compare with the float64 oracle, and q between ranks.")
@click.option("--expect", type=click.Path(path_type=Path),
              help="Compare with the tensors out and lse of this file.")  # fmt: skip
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything measured.")
def command(
    source: Path,
    out: Path | None,
    schemes: str,
    layout: str,
    device: str,
    transport: str | None,
    repeat: int,
    check: bool,
    expect: Path | None,
    json_path: Path | None,
) -> int:
    """Decode the query of INPUT over its KV cache, every rank holding a shard of the tokens.

    INPUT holds q [batch, queries, heads, head_dim], k and v [batch, tokens, kv_heads, head_dim] and may
    hold lengths [batch] (valid tokens). The softmax scale comes from the metadata entry "scale", else it
    is 1/sqrt(head_dim). Exit code 1 means that a result missed its bound or differed between ranks.
    """
    names = [collectives.canonical(name) for name in schemes.split(",")]
    chosen = parse_layout(layout)
    if out is not None and len(names) > 1:
        raise ArgumentError("--out takes the result of one scheme: name one with --scheme")
    world = comm_.world()
    with ExitStack() as outputs:
        write_out, write_json = _outputs(world, outputs, out, json_path)
        problem = _Problem(world, source, chosen, expect)
        judge = _Judge(world, problem, check)
        rows = [_measure(world, problem, judge, name, device, transport, repeat) for name in names]
        if world.rank == 0:
            last = rows[-1]
            write_out(files.save_tensors(
                {"out": last["arrays"][0], "lse": last["arrays"][1]},
                {"scale": repr(problem.scale), "scheme": names[-1]},
            ))  # fmt: skip
        placement = report.placement(world)
        summary = _summary(problem, names, rows, placement)
        write_json((json.dumps(summary, indent=1) + "\n").encode())
        if world.rank == 0:
            _print_table(problem, names, rows, placement)
            if out is not None:
                print(f"out and lse are in {out}")
    return 0 if all(row["passed"] for row in rows) else 1


class _Problem:
    """The input: q whole, k and v as this rank's shard. Raises the same `ArgumentError` on every rank."""

    def __init__(self, world: Any, source: Path, layout: Layout, expect: Path | None) -> None:
        self.source, self.layout = source, layout
        error: TreeattnError | None = None
        try:
            self._open(world, expect)
        except TreeattnError as found:
            error = found
        comm_.agree(world, {} if error else {"the input file": self.identity}, error)
        self._load(world)

    def _open(self, world: Any, expect: Path | None) -> None:
        self.file = files.open_cache(self.source)
        q, k, v = (self.file[name] for name in "qkv")
        for name, tensor in zip("qkv", (q, k, v), strict=True):
            if tensor.ndim != 4:
                raise ArgumentError(
                    f"{self.source}: {name} has shape {list(tensor.shape)}, expected four axes"
                )
        self.shape = Shape(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3], dtype_name(q))
        self.shape.check_query(q)
        self.shape.check_cache(k, v)
        self.tokens = k.shape[1]
        stated = self.file.scale()
        self.scale = self.shape.default_scale() if stated is None else stated
        self.runs = self.layout.runs(self.tokens, world.rank, world.size)
        self.lengths = None
        if "lengths" in self.file.tensors:
            lengths = self.shape.check_lengths(self.file["lengths"], self.tokens)
            self.lengths = self.layout.shard_lengths(lengths, self.tokens, world.rank, world.size)
        self.expected = None
        if expect is not None:
            wanted = files.open_cache(expect)
            self.expected = (np.array(wanted["out"]), np.array(wanted["lse"]))
            if self.expected[0].shape != q.shape or self.expected[1].shape != self.shape.lse_shape:
                raise ArgumentError(f"{expect}: out and lse do not have the shapes that {self.source} gives")
        self.identity = (self.shape, self.tokens, self.scale, self.source.stat().st_size)

    def _load(self, world: Any) -> None:
        self.q = np.array(self.file["q"])
        nbytes = 2 * self.file["k"].nbytes * sum(len(range(*r.indices(self.tokens))) for r in self.runs)
        bar = Progress(
            TextColumn("reading the shard of rank 0"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            console=Console(stderr=True), transient=True,
            disable=world.rank != 0 or not sys.stderr.isatty(),
        )  # fmt: skip
        with bar:
            task = bar.add_task("", total=nbytes // max(self.tokens, 1))
            self.k, self.v = (
                files.load_runs(self.file[name], self.runs, lambda done: bar.advance(task, done))
                for name in "kv"
            )


class _Judge:
    """Says how far a result is from the oracle and from the expected tensors."""

    def __init__(self, world: Any, problem: _Problem, check: bool) -> None:
        self.world = world
        self.against: dict[str, tuple[Any, Any]] = {}
        self.bounds: tuple[float, float] | None = None
        if check or problem.expected is not None:
            if check:
                comm_.agree(world, {"q": hashlib.sha256(problem.q.tobytes()).hexdigest()})
            mine = reference.partial(
                problem.q, problem.k, problem.v, scale=problem.scale, lengths=problem.lengths
            )
            partials = world.gather(mine, root=0)
            if world.rank == 0:
                self.bounds = reference.error_bounds(partials)
                if check:
                    self.against["oracle"] = reference.combine(partials)
                if problem.expected is not None:
                    self.against["expected"] = problem.expected

    def errors(self, out: Any, lse: Any) -> dict[str, tuple[float, float]]:
        """Largest |out - reference| and |lse - reference| for each reference, on rank 0."""
        return {
            name: (_largest_difference(out, wanted[0]), _largest_difference(lse, wanted[1]))
            for name, wanted in self.against.items()
        }

    def passes(self, errors: dict[str, tuple[float, float]]) -> bool:
        bounds = self.bounds
        return bounds is None or all(o <= bounds[0] and s <= bounds[1] for o, s in errors.values())


def _largest_difference(mine: Any, wanted: Any) -> float:
    """max |mine - wanted|; equal infinities and NaN in both places differ by nothing."""
    mine, wanted = np.asarray(mine, np.float64), np.asarray(wanted, np.float64)
    same = (mine == wanted) | (np.isnan(mine) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(mine - wanted))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))


def _measure(
    world: Any, problem: _Problem, judge: _Judge, scheme: str, device: str, transport: str | None, repeat: int
) -> dict[str, Any]:
    """One scheme: plan, first step, timed steps, verdicts. Collective."""
    shape = problem.shape
    with Decoder(
        world,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        batch=shape.batch,
        queries=shape.queries,
        dtype=shape.dtype,
        scheme=scheme,
        scale=problem.scale,
        device=device,
        transport=transport,
    ) as decoder:
        first = _timed_step(world, decoder, problem)
        steps = [_timed_step(world, decoder, problem) for _ in range(repeat)]
        out, lse = decoder.out.copy(), decoder.lse.copy()
        digest = hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest()
        same_bits = len(set(world.allgather(digest))) == 1
        errors = judge.errors(out, lse)
        passed = world.bcast(judge.passes(errors) and same_bits)
        return {
            "scheme": scheme,
            "same_bits": same_bits,
            "errors": errors,
            "bounds": judge.bounds,
            "passed": passed,
            "first_step_s": first,
            "step_s": {part: statistics.median(step[part] for step in steps) for part in first},
            "sha256": digest,
            "arrays": (out, lse),
            **_wire(decoder),
        }


def _timed_step(world: Any, decoder: Decoder, problem: _Problem) -> dict[str, float]:
    """Seconds of each part on the slowest rank; a barrier before each part keeps waiting out of the next."""
    clock = comm_.mpi().Wtime
    seconds = {}
    parts = {
        "local": lambda: decoder.local(problem.q, problem.k, problem.v, problem.lengths),
        "reduce": decoder.reduce,
        "finish": decoder.finish,
    }
    for part, run in parts.items():
        world.Barrier()
        began = clock()
        run()
        seconds[part] = clock() - began
    slowest = world.allgather(seconds)
    return {part: max(rank[part] for rank in slowest) for part in parts}


def _wire(decoder: Decoder) -> dict[str, Any]:
    """What the schedule sends in one step, all ranks together; unknown where a library decides."""
    schedule, certificate = decoder.schedule, decoder.certificate
    if schedule is None or certificate is None:
        unknown = dict.fromkeys(("rounds", "depth", "messages", "bytes"))
        return {"determinism": "measured", **unknown}
    count = decoder.records.size // decoder.records.shape[-1]
    parts = [schedule.chunk_slice(t.chunks, count) for round_ in schedule.rounds for t in round_]
    sent = [part.stop - part.start for part in parts if part.stop > part.start]
    return {
        "determinism": certificate.determinism,
        "rounds": certificate.rounds,
        "depth": certificate.depth,
        "messages": len(sent),
        "bytes": sum(sent) * decoder.records.shape[-1] * decoder.records.itemsize,
    }


def _outputs(world: Any, outputs: ExitStack, *paths: Path | None) -> list[Any]:
    """One writer per path, opened on rank 0 before any work; the others get writers that do nothing."""
    error: TreeattnError | None = None
    writers: list[Any] = [lambda _: None for _ in paths]
    if world.rank == 0:
        try:
            writers = [outputs.enter_context(files.pending_output(path)) for path in paths]
        except TreeattnError as found:
            error = found
    comm_.agree(world, {}, error)
    return writers


def _summary(
    problem: _Problem, names: list[str], rows: list[dict[str, Any]], placement: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "input": str(problem.source),
        "tokens": problem.tokens,
        "layout": str(problem.layout),
        "scale": problem.scale,
        "shape": {name: getattr(problem.shape, name) for name in problem.shape.__dataclass_fields__},
        "schemes": names,
        "results": [{key: value for key, value in row.items() if key != "arrays"} for row in rows],
        "ranks": placement,
        "warning": report.node_load(placement),
        "software": report.software(),
    }


def _count(number: int | None) -> str:
    return "library" if number is None else f"{number:,}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _print_table(
    problem: _Problem, names: list[str], rows: list[dict[str, Any]], placement: list[dict[str, Any]]
) -> None:
    shape = problem.shape
    nodes = len({entry["node"] for entry in placement})
    table = Table(
        title=f"{problem.source.name}: {problem.tokens} tokens, "
        f"{shape.heads} query and {shape.kv_heads} KV heads "
        f"x {shape.head_dim}, {shape.dtype}\n{_plural(len(placement), 'rank')} on {_plural(nodes, 'node')}, "
        f"{problem.layout} shards; times: median step, slowest rank",
        title_justify="left",
    )
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    bounds = rows[0]["bounds"]
    for reference_name in rows[0]["errors"]:
        for index, what in enumerate(("out", "lse")):
            table.add_row(
                f"error of {what}, {reference_name} (≤ {bounds[index]:.1e})",
                *(f"{row['errors'][reference_name][index]:.1e}" for row in rows),
            )
    table.add_row("bits equal on all ranks", *("yes" if row["same_bits"] else "NO" for row in rows))
    table.add_row("determinism class", *(row["determinism"] for row in rows))
    for key, label in (("rounds", "rounds"), ("depth", "merge depth"), ("messages", "messages, all ranks"),
                       ("bytes", "bytes, all ranks")):  # fmt: skip
        table.add_row(label, *(_count(row[key]) for row in rows))
    for part in ("local", "reduce", "finish"):
        table.add_row(f"{part}, µs", *(f"{row['step_s'][part] * 1e6:.1f}" for row in rows))
    table.add_row("verdict", *("pass" if row["passed"] else "[bold]FAIL[/bold]" for row in rows))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    warning = report.node_load(placement)
    if warning:
        console.print(f"note: {warning}", style="dim")
