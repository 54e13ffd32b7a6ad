"""``treeattn decode``: one exact attention step over a cache in a file, on all ranks of the job."""

from __future__ import annotations

import statistics
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import click

from treeattn.backends.cpu.reproducible import REPRODUCIBLE
from treeattn.backends.device import Device
from treeattn.cli import options
from treeattn.cli.options import FILE, Output
from treeattn.cli.problem import Problem
from treeattn.cli.scheme import for_out, given
from treeattn.cli.verdict import Judge, Row, ended_with, plural, show
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.decoder import Decoder
from treeattn.decoder.request import Reduction
from treeattn.mpi.communicators import collectively
from treeattn.partial import Array
from treeattn.report import Column, Progress, Report, count, microseconds
from treeattn.shards import Layout
from treeattn.study import environment


@click.command("decode")
@click.argument("source", metavar="INPUT.safetensors", type=FILE)
@click.option("--scheme", "schemes", metavar="S[,S..]",
              help="How partials are reduced over ranks; FILE.json too; several, side by side. Default: by "
                   "the nodes of the job.")  # fmt: skip
@options.LAYOUT
@options.DEVICE
@click.option("--transport", help="How records travel: mpi; from GPUs nccl, peer, cuda-mpi or host.")
@options.REPEAT
@click.option("--reproducible", type=click.Choice(REPRODUCIBLE),
              help="Bits that depend on the set of tokens alone; --check prints their SHA-256.")  # fmt: skip
@click.option("--check", is_flag=True, help="Compare with the float64 oracle, and q between ranks.")
@click.option("--expect", type=FILE, help="Compare with the tensors out and lse of this file.")
@options.output_options("Write out and lse to this safetensors file.", json="Write everything measured.")
def command(
    source: Path,
    schemes: str | None,
    layout: Layout,
    device: str,
    transport: str | None,
    repeat: int,
    reproducible: str | None,
    check: bool,
    expect: Path | None,
    output: Output,
) -> int:
    """Decode the query of INPUT over its KV cache, every rank holding a shard of the tokens.

    INPUT holds q [batch, queries, heads, head_dim], k and v [batch, tokens, kv_heads, head_dim], of one type.
    It may hold lengths [batch] (valid tokens), causal (0 or 1) and window [2] (how many tokens before and
    behind itself a query sees, -1 for all; the queries are the last tokens of each sequence). The softmax
    scale comes from the metadata entry "scale", else it is 1/sqrt(head_dim). Exit code 1 means that a result
    missed its bound or differed between ranks.
    """
    world = options.ranks()
    named = for_out(output, [None] if schemes is None else given(world, schemes))
    output.open(source, expect, world=world)
    problem = Problem(world, source, layout)
    where, inputs = _placed(world, problem, device)
    judge = Judge(world, problem, check, expect, where.rounds_weights(problem.shape))
    how = [Reduction(scheme, transport) for scheme in named]
    rows = [_measure(world, problem, judge, where, inputs, one, reproducible, repeat) for one in how]
    results = [(row.pop("out"), row.pop("lse")) for row in rows]
    machine = environment.machine(world)
    if world.rank == 0:
        output.tensors(*results[-1], scale=repr(problem.scale), scheme=rows[-1]["scheme"])
        output.report(_report(problem, rows, machine, output))
    return 0 if all(row["passed"] for row in rows) else 1


def _placed(world: Communicator, source: Problem, name: str) -> tuple[Device, tuple[Array | None, ...]]:
    """The device of this rank, and q, k, v and lengths on it."""
    device, shared = options.own_device(world, name)
    arrays = (source.q, source.k, source.v, source.lengths)
    inputs = collectively(
        world, lambda: tuple(None if array is None else device.from_host(array) for array in arrays)
    )
    if shared and world.rank == 0:
        warnings.warn(shared, RuntimeWarning, stacklevel=2)
    return device, inputs


def _measure(
    world: Communicator,
    problem: Problem,
    judge: Judge,
    device: Device,
    inputs: tuple[Array | None, ...],
    how: Reduction,
    reproducible: str | None,
    repeat: int,
) -> Row:
    """One scheme: plan, first step, timed steps, verdicts. Collective."""
    planned = problem.planned() | {"reproducible": reproducible}
    where = {"q_positions": problem.q_positions} if problem.rules.positional else {}
    with Decoder(world, **planned, scheme=how, device=device.name) as decoder:
        steps, say = [_timed_step(world, decoder, inputs, where)], Progress(world.rank == 0)
        for done in range(repeat):
            steps.append(_timed_step(world, decoder, inputs, where))
            say(f"{decoder.scheme}: {done + 1:,} of {repeat:,} steps")
        out, lse = device.to_host(decoder.out), device.to_host(decoder.lse)
        first, *others = steps
        return {
            **ended_with(world, decoder, judge, out, lse, reproducible),
            "device": device.name,
            "transport": decoder.transport,
            "first_step_s": first,
            "step_s": {part: statistics.median(step[part] for step in others) for part in first},
            **_wire(world, decoder),
        }


def _timed_step(
    world: Communicator, decoder: Decoder, inputs: tuple[Any, ...], where: dict[str, Any]
) -> dict[str, float]:
    """Seconds of each part on the slowest rank; a barrier before each part keeps waiting out of the next.
    What a GPU was given to do is waited for."""
    clock = time.perf_counter
    seconds = {}
    for part, run in (
        ("local", lambda: decoder.local(*inputs, **where)),
        ("reduce", decoder.reduce),
        ("finish", decoder.finish),
    ):
        world.barrier()
        began = clock()
        run()
        decoder.synchronize()
        seconds[part] = clock() - began
    everyone = world.allgather(seconds)
    return {part: max(rank[part] for rank in everyone) for part in seconds}


def _wire(world: Communicator, decoder: Decoder) -> dict[str, Any]:
    """What is sent in one step, all ranks together; a library decides that, and the "payload" is what it was
    given. Collective."""
    proof = decoder.certificate
    everyone: list[Any] = world.allgather(decoder.sent)
    facts = {name: getattr(proof, name, None) for name in ("rounds", "depth", "messages", "bytes")}
    if everyone[0] is None:
        return facts
    if isinstance(everyone[0], int):
        return facts | {"payload": sum(everyone)}
    sizes = [size for sent in everyone for _, size in sent]
    return facts | {"messages": len(sizes), "bytes": sum(sizes)}


def _report(problem: Problem, rows: list[Row], machine: dict[str, Any], output: Output) -> Report:
    ranks, nodes = len(machine["ranks"]), {one["node"] for one in machine["ranks"]}
    made = Report({**problem.described, "schemes": [row["scheme"] for row in rows], "results": rows}, machine)
    made.line(f"{problem.source.name}: {problem.tokens} tokens, {problem.heads}")
    where = f"{plural(ranks, 'rank')} on {plural(len(nodes), 'node')}"
    made.line(f"{where}, {problem.layout} shards; times: median step, slowest rank, µs\n")
    show(made, rows, [
        *(Column(name, partial(_sent, name), count, wide=True)
          for name in ("rounds", "depth", "messages", "bytes")),
        *(Column(part, partial(_median, part), microseconds) for part in ("local", "reduce", "finish")),
    ], output)  # fmt: skip
    return made


def _sent(name: str, row: Row) -> object:
    """A baseline has no rounds that were proved, a library tells nothing."""
    return "library" if row["messages"] is None else row[name]


def _median(part: str, row: Row) -> float:
    return float(row["step_s"][part] * 1e6)
