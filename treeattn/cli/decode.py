"""``treeattn decode``: one exact attention step over a cache in a file, on all ranks of the job."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import click

from treeattn.backends.cpu.reproducible import REPRODUCIBLE
from treeattn.cli import options
from treeattn.cli.options import FILE, Output
from treeattn.cli.problem import Problem
from treeattn.cli.scheme import for_out, given
from treeattn.cli.verdict import Judge, Row, conclude, ended_with, timed
from treeattn.decoder import Decoder
from treeattn.decoder.request import Reduction
from treeattn.mpi.communicators import collectively
from treeattn.report import Column, microseconds
from treeattn.shards import Layout


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
    where, shared = options.own_device(world, device)
    arrays = (problem.q, problem.k, problem.v, problem.lengths)
    inputs: Any = collectively(
        world, lambda: [array if array is None else where.from_host(array) for array in arrays]
    )
    if shared and world.rank == 0:
        warnings.warn(shared, RuntimeWarning, stacklevel=2)
    judge = Judge(world, problem, check, expect, where.rounds_weights(problem.shape))
    planned = problem.planned() | {"reproducible": reproducible, "device": where.name}
    queries = {"q_positions": problem.q_positions} if problem.rules.positional else {}
    rows: list[Row] = []
    for scheme in named:
        with Decoder(world, **planned, scheme=Reduction(scheme, transport)) as decoder:
            first, others = timed(world, decoder, repeat, {
                "local": partial(decoder.local, *inputs, **queries),
                "reduce": decoder.reduce,
                "finish": decoder.finish,
            })  # fmt: skip
            out, lse = where.to_host(decoder.out), where.to_host(decoder.lse)
            rows.append({
                **ended_with(world, decoder, judge, out, lse, reproducible),
                "device": where.name,
                "transport": decoder.transport,
                "first_step_s": first,
                "step_s": others,
            })  # fmt: skip
    parts = (Column(part, partial(_median, part), microseconds) for part in ("local", "reduce", "finish"))
    return conclude(world, problem, rows, list(parts), output)


def _median(part: str, row: Row) -> float:
    return float(row["step_s"][part] * 1e6)
