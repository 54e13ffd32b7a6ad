"""``treeattn decode``: one exact attention step over a cache in a file, on all ranks of the job."""

from __future__ import annotations

import hashlib
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from treeattn import communicators, files, mpi_library
from treeattn.agreement import collectively, must_match
from treeattn.attention.mask import Rules
from treeattn.backends.device import Device
from treeattn.cli.console import (
    LEGEND,
    WIDE,
    Lines,
    console,
    count,
    identical,
    magnitude,
    microseconds,
    table,
)
from treeattn.cli.own_device import own_device
from treeattn.cli.problem import Judge, Problem, open_outputs
from treeattn.cli.rules import rule_options
from treeattn.cli.rules import window as read_window
from treeattn.cli.scheme import given
from treeattn.collectives.runtime.reducer import Sent
from treeattn.decoder import Decoder
from treeattn.decoder.request import Reduction
from treeattn.errors import ArgumentError
from treeattn.report import as_json
from treeattn.shards import LAYOUTS, parse_layout
from treeattn.study import environment

__all__ = ["command"]


@click.command("decode")
@click.argument("source", metavar="INPUT.safetensors", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Write out and lse to this safetensors file.")
@click.option("--scheme", "schemes", default="hierarchical", show_default=True, metavar="S[,S..]",
              help="How partials are reduced over ranks; FILE.json too; several, side by side.")  # fmt: skip
@click.option("--layout", default="contiguous", show_default=True, metavar="|".join(LAYOUTS),
              help="Which tokens go to which rank.")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--transport", default=None,
              help="How records travel: mpi; from GPUs nccl, peer, cuda-mpi or host.")  # fmt: skip
@rule_options
@click.option("--repeat", type=click.IntRange(1), default=10, show_default=True,
              help="Timed steps after the first one.")  # fmt: skip
@click.option("--check", is_flag=True, help="Compare with the float64 oracle, and q between ranks.")
@click.option("--expect", type=click.Path(path_type=Path),
              help="Compare with the tensors out and lse of this file.")  # fmt: skip
@WIDE
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything measured.")
def command(
    source: Path,
    out: Path | None,
    schemes: str,
    layout: str,
    device: str,
    transport: str | None,
    causal: bool,
    window: str | None,
    leading: int,
    softcap: float | None,
    repeat: int,
    check: bool,
    expect: Path | None,
    wide: bool,
    json_path: Path | None,
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
    chosen = parse_layout(layout)
    world = communicators.world()
    named = given(world, schemes)
    if out is not None and len(named) > 1:
        raise ArgumentError("--out takes the result of one scheme: name one with --scheme")
    rules = Rules(causal, read_window(window), leading, softcap)
    options = (schemes, str(chosen), repeat, check, device, transport, str(source), str(expect), str(rules))
    must_match(world, {"the command line": options})
    write_out, write_json = open_outputs(world, [source, expect], [out, json_path])
    problem = Problem(world, source, chosen, expect, rules)
    where, inputs = _placed(world, problem, device)
    judge = Judge(world, problem, check, where.rounds_weights(problem.shape))
    rows = [_measure(world, problem, judge, where, inputs, scheme, transport, repeat) for scheme in named]
    if world.rank == 0:
        last = rows[-1]
        write_out(files.save_tensors(
            {"out": last["arrays"][0], "lse": last["arrays"][1]},
            {"scale": repr(problem.scale), "scheme": last["scheme"]},
        ))  # fmt: skip
    placement = environment.placement(world)
    if world.rank == 0:
        if json_path is not None:
            write_json(as_json(_summary(problem, rows, placement)))
        _print_table(console(wide), wide, problem, rows, placement)
        if out is not None:
            print(f"out and lse are in {out}")
    return 0 if all(row["passed"] for row in rows) else 1


def _placed(world: Any, source: Problem, name: str) -> tuple[Device, tuple[Any, ...]]:
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
    world: Any,
    problem: Problem,
    judge: Judge,
    device: Device,
    inputs: tuple[Any, ...],
    scheme: str,
    transport: str | None,
    repeat: int,
) -> dict[str, Any]:
    """One scheme: plan, first step, timed steps, verdicts. Collective."""
    with Decoder(
        world,
        **problem.planned(),
        scheme=Reduction(scheme, transport),
        device=device.name,
    ) as decoder:
        step, seen = problem.step(inputs)
        first = _timed_step(world, decoder, step, seen)
        steps, say = [], Lines(world.rank == 0)
        for done in range(repeat):
            steps.append(_timed_step(world, decoder, step, seen))
            say(f"{scheme}: {done + 1:,} of {repeat:,} steps")
        out, lse = device.to_host(decoder.out), device.to_host(decoder.lse)
        digest = hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest()
        same_bits = len(set(world.allgather(digest))) == 1
        errors, nan = judge.errors(out, lse), judge.nan(out, lse)
        passed = world.bcast(judge.passes(errors) and same_bits)
        return {
            "scheme": scheme,
            "why": decoder.why,
            "device": device.name,
            "transport": decoder.transport,
            "executor": decoder.executor,
            "same_bits": same_bits,
            "errors": errors,
            "nan": nan,
            "bounds": judge.bounds,
            "passed": passed,
            "first_step_s": first,
            "step_s": {part: statistics.median(step[part] for step in steps) for part in first},
            "sha256": digest,
            "arrays": (out, lse),
            **_wire(world, decoder),
        }


def _timed_step(
    world: Any, decoder: Decoder, step: tuple[Any, ...], seen: dict[str, Any]
) -> dict[str, float]:
    """Seconds of each part on the slowest rank; a barrier before each part keeps waiting out of the next.
    What a GPU was given to do is waited for."""
    clock = mpi_library.load().Wtime
    seconds = {}
    parts = {
        "local": lambda: decoder.local(*step, **seen),
        "reduce": decoder.reduce,
        "finish": decoder.finish,
    }
    for part, run in parts.items():
        world.Barrier()
        began = clock()
        run()
        decoder.synchronize()
        seconds[part] = clock() - began
    slowest = world.allgather(seconds)
    return {part: max(rank[part] for rank in slowest) for part in parts}


def _wire(world: Any, decoder: Decoder) -> dict[str, Any]:
    """What is sent in one step, all ranks together; a library decides that, and the "payload" is what it was
    given. Collective."""
    proof, everyone = decoder.certificate, world.allgather(decoder.sent)
    facts = {name: getattr(proof, name, None) for name in ("rounds", "depth", "messages", "bytes")}
    facts["determinism"] = "measured" if proof is None else proof.determinism
    if everyone[0] is None:
        return facts
    if isinstance(everyone[0], Sent):
        return facts | {"payload": sum(sent.bytes for sent in everyone)}
    sizes = [size for sent in everyone for _, size in sent]
    return facts | {"messages": len(sizes), "bytes": sum(sizes)}


def _summary(problem: Problem, rows: list[dict[str, Any]], placement: list[dict[str, Any]]) -> dict[str, Any]:
    shape = problem.shape
    cache = {"cache_dtype": shape.kv_dtype, "v_dim": shape.v_dim, "page_size": shape.page_size}
    return {
        "input": str(problem.source),
        "tokens": problem.tokens,
        "layout": str(problem.layout),
        "scale": problem.scale,
        "shape": shape.plain | cache,
        "rules": {name: np.asarray(getattr(problem.rules, name)).tolist() for name in problem.rules.names},
        "schemes": [row["scheme"] for row in rows],
        "results": [{key: value for key, value in row.items() if key != "arrays"} for row in rows],
        "ranks": placement,
        "warning": environment.warning(placement),
        "software": environment.software(),
    }


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _print_table(
    screen: Console, wide: bool, problem: Problem, rows: list[dict[str, Any]], placement: list[dict[str, Any]]
) -> None:
    shape, nodes = problem.shape, len({entry["node"] for entry in placement})
    heads = f"{shape.heads} heads ({shape.kv_heads} KV) x {shape.head_dim}"
    heads += f", values of {shape.v_dim}" if shape.v_dim != shape.head_dim else ""
    dtypes = f"{shape.dtype} over {shape.kv_dtype}" if shape.mixed else shape.dtype
    screen.print(f"{problem.source.name}: {problem.tokens} tokens, {heads}, {dtypes}")
    where = f"{_plural(len(placement), 'rank')} on {_plural(nodes, 'node')}, {problem.layout} shards"
    screen.print(f"{where}; times: median step, slowest rank, µs\n")
    table(screen, _columns(rows[0], wide), rows)
    bounds, references = rows[0]["bounds"], " and ".join(rows[0]["errors"])
    if references:
        screen.print(f"errors: against {references}; at most {bounds[0]:.1e} of out, {bounds[1]:.1e} of lse")
    screen.print(LEGEND)
    for row in rows:
        if row["why"]:
            screen.print(f"{row['scheme']}: took {row['why']}")
        if row["nan"]["results"] or any(row["nan"]["references"].values()):
            screen.print(f"{row['scheme']}: {_about_nan(row['nan'])}")
    warning = environment.warning(placement)
    if warning:
        screen.print(f"note: {warning}", style="dim")


def _columns(first: dict[str, Any], wide: bool) -> dict[str, Callable[[dict[str, Any]], str]]:
    """Heading -> what a scheme's row has there."""
    errors = ("out", "lse")[: 1 + wide] if first["errors"] else ()
    return {
        "scheme": itemgetter("scheme"),
        **{f"error\nof {name}": partial(_worst, index) for index, name in enumerate(errors)},
        "identical\nbits": lambda row: identical(row["determinism"], row["same_bits"]),
        **{name: partial(_sent, name) for name in ("rounds", "depth", "messages", "bytes") if wide},
        **{part: partial(_median, part) for part in ("local", "reduce", "finish")},
        "verdict": _verdict,
    }


def _worst(index: int, row: dict[str, Any]) -> str:
    return magnitude(max(errors[index] for errors in row["errors"].values()))


def _sent(name: str, row: dict[str, Any]) -> str:
    """A baseline has no rounds that were proved, a library tells nothing."""
    return "library" if row["messages"] is None else count(row[name])


def _median(part: str, row: dict[str, Any]) -> str:
    return microseconds(row["step_s"][part] * 1e6)


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
