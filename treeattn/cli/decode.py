"""``treeattn decode``: one exact attention step over a cache in a file, on all ranks of the job."""

from __future__ import annotations

import statistics
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from treeattn import mpi_library
from treeattn.agreement import collectively
from treeattn.attention.mask import Rules
from treeattn.backends.device import Device
from treeattn.cli import options
from treeattn.cli.options import FILE, Output
from treeattn.cli.own_device import own_device
from treeattn.cli.problem import Judge, Problem, ended_with, heads_of, show_digests
from treeattn.cli.scheme import for_out, given
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.runtime.reducer import Sent
from treeattn.decoder import Decoder
from treeattn.decoder.reproducible import REPRODUCIBLE
from treeattn.decoder.request import Reduction
from treeattn.partial import Array
from treeattn.report import LEGEND, Column, Progress, Report, count, identical, microseconds
from treeattn.shards import Layout
from treeattn.study import environment


@click.command("decode")
@click.argument("source", metavar="INPUT.safetensors", type=FILE)
@click.option("--scheme", "schemes", metavar="S[,S..]",
              help="How partials are reduced over ranks; FILE.json too; several, side by side. Default: by "
                   "the nodes of the job.")  # fmt: skip
@options.layout_option()
@options.DEVICE
@click.option("--transport", help="How records travel: mpi; from GPUs nccl, peer, cuda-mpi or host.")
@options.rule_options
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
    rules: Rules,
    repeat: int,
    reproducible: str | None,
    check: bool,
    expect: Path | None,
    output: Output,
) -> int:
    """Decode the query of INPUT over its KV cache, every rank holding a shard of the tokens.

    INPUT holds q [batch, queries, heads, head_dim], k and v [batch, tokens, kv_heads, head_dim]; k and v of
    8 bits with k_scale and v_scale, one number or [kv_heads]; without v the metadata entry "v_dim" says how
    many of k's first channels are the values (latent attention, which needs "scale" too). It may hold lengths
    [batch] (valid tokens), positions [tokens] and q_positions [queries] or [batch, queries] (default: the
    last tokens of each sequence), alibi and sink_logits [heads]. With block_table [batch, pages of a
    sequence] k and v are [pages, page_size, kv_heads, head_dim], lengths are needed, and the layout deals out
    pages. The softmax scale comes from the metadata entry "scale", else it is 1/sqrt(head_dim). Exit code 1
    means that a result missed its bound or differed between ranks.
    """
    world = options.world()
    named = for_out(output, given(world, schemes) if schemes else [None])
    output.open(source, expect, world=world)
    problem = Problem(world, source, layout, expect, rules)
    where, inputs = _placed(world, problem, device)
    judge = Judge(world, problem, check, where.rounds_weights(problem.shape))
    how = [Reduction(scheme, transport) for scheme in named]
    rows = [_measure(world, problem, judge, where, inputs, one, reproducible, repeat) for one in how]
    results = [(row.pop("out"), row.pop("lse")) for row in rows]
    machine = environment.machine(world)
    if world.rank == 0:
        output.tensors(*results[-1], scale=repr(problem.scale), scheme=rows[-1]["scheme"])
        output.report(_report(problem, rows, machine, output))
    return 0 if all(row["passed"] for row in rows) else 1


def _placed(world: MpiCommunicator, source: Problem, name: str) -> tuple[Device, tuple[Array | None, ...]]:
    """The device of this rank, and q, k, v and lengths on it."""
    device, shared = own_device(world, name)
    arrays = (source.q, source.k, source.v, source.lengths)
    inputs = collectively(
        world, lambda: tuple(None if array is None else device.from_host(array) for array in arrays)
    )
    if shared and world.rank == 0:
        warnings.warn(shared, RuntimeWarning, stacklevel=2)
    return device, inputs


def _measure(
    world: MpiCommunicator,
    problem: Problem,
    judge: Judge,
    device: Device,
    inputs: tuple[Array | None, ...],
    how: Reduction,
    reproducible: str | None,
    repeat: int,
) -> dict[str, Any]:
    """One scheme: plan, first step, timed steps, verdicts. Collective."""
    planned = problem.planned() | {"reproducible": reproducible}
    with Decoder(world, **planned, scheme=how, device=device.name) as decoder:
        step, seen = problem.step(inputs)
        first = _timed_step(world, decoder, step, seen)
        steps, say = [], Progress(world.rank == 0)
        for done in range(repeat):
            steps.append(_timed_step(world, decoder, step, seen))
            say(f"{decoder.scheme}: {done + 1:,} of {repeat:,} steps")
        out, lse = device.to_host(decoder.out), device.to_host(decoder.lse)
        facts = ended_with(world, decoder, out, lse, reproducible)
        errors, nan = judge.errors(out, lse), judge.nan(out, lse)
        passed = world.bcast(judge.passes(errors) and facts["same_bits"])
        return {
            **facts,
            "why": decoder.why,
            "device": device.name,
            "transport": decoder.transport,
            "errors": errors,
            "nan": nan,
            "bounds": judge.bounds,
            "passed": passed,
            "first_step_s": first,
            "step_s": {part: statistics.median(step[part] for step in steps) for part in first},
            "out": out,
            "lse": lse,
            **_wire(world, decoder),
        }


def _timed_step(
    world: MpiCommunicator, decoder: Decoder, step: tuple[Array, ...], seen: dict[str, Any]
) -> dict[str, float]:
    """Seconds of each part on the slowest rank; a barrier before each part keeps waiting out of the next.
    What a GPU was given to do is waited for."""
    clock = mpi_library.load().Wtime
    seconds = {}
    for part, run in (
        ("local", lambda: decoder.local(*step, **seen)),
        ("reduce", decoder.reduce),
        ("finish", decoder.finish),
    ):
        world.Barrier()
        began = clock()
        run()
        decoder.synchronize()
        seconds[part] = clock() - began
    everyone = world.allgather(seconds)
    return {part: max(rank[part] for rank in everyone) for part in seconds}


def _wire(world: MpiCommunicator, decoder: Decoder) -> dict[str, Any]:
    """What is sent in one step, all ranks together; a library decides that, and the "payload" is what it was
    given. Collective."""
    proof, everyone = decoder.certificate, world.allgather(decoder.sent)
    facts = {name: getattr(proof, name, None) for name in ("rounds", "depth", "messages", "bytes")}
    if everyone[0] is None:
        return facts
    if isinstance(everyone[0], Sent):
        return facts | {"payload": sum(sent.bytes for sent in everyone)}
    sizes = [size for sent in everyone for _, size in sent]
    return facts | {"messages": len(sizes), "bytes": sum(sizes)}


def _report(
    problem: Problem,
    rows: list[dict[str, Any]],
    machine: dict[str, Any],
    output: Output,
) -> Report:
    shape, ranks = problem.shape, machine["ranks"]
    cache = {"cache_dtype": shape.kv_dtype, "v_dim": shape.v_dim, "page_size": shape.page_size}
    made = Report({
        "input": str(problem.source),
        "tokens": problem.tokens,
        "layout": str(problem.layout),
        "scale": problem.scale,
        "shape": shape.plain | cache,
        "rules": {name: np.asarray(getattr(problem.rules, name)).tolist() for name in problem.rules.names},
        "schemes": [row["scheme"] for row in rows],
        "results": rows,
    }, machine)  # fmt: skip
    values = f", values of {shape.v_dim}" if shape.v_dim != shape.head_dim else ""
    dtypes = f"{shape.dtype} over {shape.kv_dtype}" if shape.mixed else shape.dtype
    made.line(f"{problem.source.name}: {problem.tokens} tokens, {heads_of(shape)}{values}, {dtypes}")
    where = f"{_plural(len(ranks), 'rank')} on {_plural(len({rank['node'] for rank in ranks}), 'node')}"
    made.line(f"{where}, {problem.layout} shards; times: median step, slowest rank, µs\n")
    made.table(rows, _columns(rows[0]))
    bounds, references = rows[0]["bounds"], " and ".join(rows[0]["errors"])
    if references:
        made.line(f"errors: against {references}; at most {bounds[0]:.1e} of out, {bounds[1]:.1e} of lse")
    made.line(LEGEND)
    if references and rows[0]["reproducible"]:
        show_digests(made, rows)
    for row in rows:
        if row["why"]:
            made.line(f"{row['scheme']}: took {row['why']}")
        if row["nan"]["results"] or any(row["nan"]["references"].values()):
            made.line(f"{row['scheme']}: {_about_nan(row['nan'])}")
    if output.out is not None:
        made.text(f"out and lse are in {output.out}")
    return made


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _columns(first: dict[str, Any]) -> list[Column[dict[str, Any]]]:
    errors = [
        Column(f"error\nof {name}", partial(_worst, index), ".1e", wide=bool(index))
        for index, name in enumerate(("out", "lse"))
    ]
    return [
        Column("scheme", words=True),
        *(errors if first["errors"] else ()),
        Column("identical\nbits", lambda row: identical(row["determinism"], row["same_bits"])),
        *(Column(name, partial(_sent, name), count, wide=True)
          for name in ("rounds", "depth", "messages", "bytes")),
        *(Column(part, partial(_median, part), microseconds) for part in ("local", "reduce", "finish")),
        Column("verdict", _verdict),
    ]  # fmt: skip


def _worst(index: int, row: dict[str, Any]) -> float:
    return max(float(errors[index]) for errors in row["errors"].values())


def _sent(name: str, row: dict[str, Any]) -> object:
    """A baseline has no rounds that were proved, a library tells nothing."""
    return "library" if row["messages"] is None else row[name]


def _median(part: str, row: dict[str, Any]) -> float:
    return float(row["step_s"][part] * 1e6)


def _verdict(row: dict[str, Any]) -> str:
    judged = not row["nan"]["results"] or row["errors"]
    word = ("pass" if judged else "") if row["passed"] else "FAIL"
    return ", ".join(filter(None, (word, "NaN" if row["nan"]["results"] else "")))


def _about_nan(nan: dict[str, Any]) -> str:
    """How many results are NaN, whether they should be, and who brought it."""
    text = f"{nan['results']} of {nan['of']} results are NaN"
    if not nan["references"]:
        return f"{text}: --check tells whether they should be, and whose tokens bring it"
    for name, wanted in nan["references"].items():
        text += f"; {name} has {wanted}"
    text += ", in the same heads" if nan["same_rows"] else ", not in the same heads"
    ranks = ", ".join(map(str, nan["ranks"]))
    brought = f"the tokens of rank{'s' * (len(nan['ranks']) > 1)} {ranks} bring it"
    return f"{text}; {brought if ranks else 'the tokens of no rank bring it'}"
