"""``treeattn audit``: whether a recorded decode gives the same bits here, and if not, what differs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from treeattn.attention.mask import Rules
from treeattn.cli import options
from treeattn.cli.options import FILE, Output
from treeattn.cli.problem import Problem, seen_by_all
from treeattn.decoder import Decoder
from treeattn.errors import ArgumentError
from treeattn.partial import Array
from treeattn.report import Report
from treeattn.shards import Layout

if TYPE_CHECKING:
    from treeattn.collectives.runtime.mpi_communicator import MpiCommunicator

_BLOCK = 256  # tokens with a fingerprint of their own


@click.command("audit")
@click.argument("recording", metavar="RECORDING.json", type=FILE)
@click.option("--input", "source", type=FILE, help="The cache, where it lies elsewhere than it did.")
@options.output_options(wide=False)
def command(recording: Path, source: Path | None, output: Output) -> int:
    """Run a recorded decode again, on these ranks or on one process, and compare its bits.

    RECORDING is what `treeattn decode --reproducible .. --json` wrote on any number of ranks. Exit code 1
    means that bits differ; then the query, the blocks of tokens and the heads that differ are named.
    """
    facts = _read(recording)
    then = facts["results"][0]
    world = options.world()
    source = source or Path(facts["input"])
    output.open(recording, source, world=world)
    given = {name: facts["rules"][name] for name in facts["rules"] if name not in ("alibi", "sink_logits")}
    if "window" in given:
        given["window"] = tuple(given["window"])
    problem = Problem(world, source, Layout("contiguous"), None, Rules(**given))
    planned = problem.planned() | {"reproducible": then["reproducible"]}
    with Decoder(world, **planned) as decoder:
        step, seen = problem.step((problem.q, problem.k, problem.v, problem.lengths))
        out, lse = decoder(*step, **seen)
        digest, _ = seen_by_all(world, out, lse)
    now = fingerprint(world, problem)
    heads = _unlike(then["heads"], head_digests(out, lse))
    same = digest == then["sha256"]
    found = {
        "recorded": then["sha256"],
        "here": digest,
        "same": same,
        "query_differs": now["query"] != facts["query"],
        "blocks": [[_BLOCK * at, _BLOCK * (at + 1)] for at in _unlike(facts["blocks"], now["blocks"])],
        "heads": heads,
    }
    if world.rank == 0:
        output.report(_report(found, source, len(facts["ranks"])))
    return 0 if same else 1


def fingerprint(world: MpiCommunicator, problem: Problem) -> dict[str, Any]:
    """Of the query, and of each 256 tokens of the cache, whoever holds them. Collective."""
    own: dict[int, int] = {}
    tensors: list[Any] = [problem.k] if problem.latent else [problem.k, problem.v]
    rows = [tensor if problem.paged is None else problem.paged.rows(tensor) for tensor in tensors]
    for index, token in enumerate(np.asarray(problem.own).tolist()):
        content = b"".join(np.ascontiguousarray(row[:, index]).view(np.uint8).tobytes() for row in rows)
        digest = hashlib.blake2b(content + token.to_bytes(8, "little"), digest_size=8).digest()
        own[token // _BLOCK] = own.get(token // _BLOCK, 0) + int.from_bytes(digest, "little")
    everyone = world.allgather(own)
    sums = (sum(one.get(at, 0) for one in everyone) for at in range(-(-problem.tokens // _BLOCK)))
    query = hashlib.sha256(np.ascontiguousarray(problem.q).view(np.uint8).tobytes()).hexdigest()
    return {"query": query, "blocks": [f"{total % (1 << 64):016x}" for total in sums]}


def head_digests(out: Array, lse: Array) -> list[str]:
    """Of each query head's result."""
    return [
        hashlib.sha256(out[:, :, head].tobytes() + lse[:, head].tobytes()).hexdigest()[:16]
        for head in range(lse.shape[1])
    ]


def _read(recording: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(recording.read_text(encoding="utf-8"))
        if facts["results"][0]["reproducible"] and facts["blocks"]:
            return facts
    except (ValueError, KeyError, IndexError, TypeError):
        pass
    raise ArgumentError(f"{recording} is no recording: write one with decode --reproducible tokens --json")


def _unlike(then: list[str], now: list[str]) -> list[int]:
    if len(then) != len(now):
        return list(range(max(len(then), len(now))))
    return [index for index, (one, other) in enumerate(zip(then, now, strict=True)) if one != other]


def _report(found: dict[str, Any], source: Path, ranks: int) -> Report:
    made = Report(found)
    made.text(f"{source.name}: recorded on {ranks} rank{'s' * (ranks != 1)}, SHA-256 {found['recorded']}")
    if found["same"]:
        made.line("run again here: the same bits")
        return made
    made.text(f"run again here: other bits, SHA-256 {found['here']}")
    if found["query_differs"]:
        made.line("the query is another one")
    for begin, end in found["blocks"][:8]:
        made.line(f"the cache differs in tokens {begin} to {end - 1}")
    made.line(f"results differ in heads {', '.join(map(str, found['heads']))}")
    return made
