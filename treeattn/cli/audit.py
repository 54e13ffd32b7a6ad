"""``treeattn audit``: whether what was recorded gives the same bits here, and if not, what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import click
import msgspec
import numpy as np

from treeattn.agreement import collectively
from treeattn.attention.mask import Rules
from treeattn.cli import options
from treeattn.cli.options import FILE, Output
from treeattn.cli.problem import BLOCK, Problem, digest, fingerprint, head_digests
from treeattn.cli.verify import Drafts
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.decoder import Decoder
from treeattn.errors import ArgumentError
from treeattn.llama import Llama, Sampling, Session
from treeattn.llama.attended import Attended, first_difference
from treeattn.llama.generate import generate
from treeattn.partial import Array
from treeattn.report import Report
from treeattn.shards import Layout
from treeattn.token_tree import Verifier

_Some: TypeAlias = Annotated[list[str], msgspec.Meta(min_length=1)]


class _Result(msgspec.Struct):
    reproducible: str
    sha256: str
    heads: list[str]


class _Rules(msgspec.Struct, forbid_unknown_fields=True):
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    leading: int = 0
    softcap: float | None = None
    alibi: Any = None  # these two lie in the input
    sink_logits: Any = None


class OfStep(msgspec.Struct):
    """What `decode` and `verify` record, as far as it is read here."""

    ranks: list[Any]
    source: str = msgspec.field(name="input")
    query: str
    blocks: _Some
    results: Annotated[list[_Result], msgspec.Meta(min_length=1)]
    rules: _Rules = msgspec.field(default_factory=_Rules)
    nodes: Any = None  # of a verification


class OfText(msgspec.Struct):
    """The same of `generate`."""

    ranks: list[Any]
    source: str = msgspec.field(name="model")
    prompt: list[int]
    tokens: list[int]
    logits: _Some
    logits_sha256: str
    capacity: int
    cache_dtype: str
    sampling: Sampling
    attended: list[list[list[str]]] | None

    def __post_init__(self) -> None:
        if self.attended:
            np.array(self.attended)  # raises where lists of one level have unlike lengths


@click.command("audit")
@click.argument("recording", metavar="RECORDING.json", type=FILE)
@click.option("--input", "source", type=FILE, help="The cache or model, where it lies elsewhere than it did.")
@options.output_options(wide=False)
def command(recording: Path, source: Path | None, output: Output) -> int:
    """Run a recorded decode, verification or text again, on any ranks or none, and compare its bits.

    RECORDING is what decode, verify or generate wrote with --reproducible and --json, on any number of
    ranks. Exit code 1 means that bits differ; then the query, the blocks of tokens and the heads that differ
    are named; of a text the first token, and the first block of tokens, layer and heads.
    """
    facts = _read(recording)
    world = options.world()
    source = source or Path(facts.source)
    output.open(recording, source, world=world)
    if isinstance(facts, OfText):
        found, lines = _text(world, facts, source)
    else:
        found, lines = _step(world, facts, source)
    if world.rank == 0:
        made, ranks = Report(found), len(facts.ranks)
        recorded = f"recorded on {ranks} rank{'s' * (ranks != 1)}, SHA-256 {found['recorded']}"
        made.text(f"{source.name}: {recorded}")
        if found["same"]:
            made.line("run again here: the same bits")
        else:
            made.text(f"run again here: other bits, SHA-256 {found['here']}")
            for line in lines:
                made.line(line)
        output.report(made)
    return 0 if found["same"] else 1


def _step(world: MpiCommunicator, facts: OfStep, source: Path) -> tuple[dict[str, Any], list[str]]:
    then, rules = facts.results[0], facts.rules
    seen = Rules(causal=rules.causal, window=rules.window, leading=rules.leading, softcap=rules.softcap)
    problem = Problem(world, source, Layout("contiguous"), None, seen)
    out, lse = (_verified if facts.nodes is not None else _decoded)(world, problem, then.reproducible)
    here = digest(out, lse)
    now = fingerprint(world, problem)
    found = {
        "recorded": then.sha256,
        "here": here,
        "same": here == then.sha256,
        "query_differs": now["query"] != facts.query,
        "blocks": [[BLOCK * at, BLOCK * (at + 1)] for at in _unlike(facts.blocks, now["blocks"])],
        "heads": _unlike(then.heads, head_digests(out, lse)),
    }
    lines = ["the query is another one"] if found["query_differs"] else []
    lines += [f"the cache differs in tokens {begin} to {end - 1}" for begin, end in found["blocks"][:8]]
    return found, [*lines, f"results differ in heads {', '.join(map(str, found['heads']))}"]


def _decoded(world: MpiCommunicator, problem: Problem, reproducible: str) -> tuple[Array, Array]:
    with Decoder(world, **problem.planned(), reproducible=reproducible) as decoder:
        step, seen = problem.step((problem.q, problem.k, problem.v, problem.lengths))
        out, lse = decoder(*step, **seen)
        return out.copy(), lse.copy()


def _verified(world: MpiCommunicator, problem: Problem, reproducible: str) -> tuple[Array, Array]:
    drafts = Drafts(world, problem, "single")
    shape = drafts.shape.plain | {"scale": problem.scale, "reproducible": reproducible}
    with Verifier(world, nodes=shape.pop("queries"), **shape) as verifier:
        out, lse = verifier(*drafts.step(), shard_lengths=drafts.shard_lengths)
        return out.copy(), lse.copy()


def _text(world: MpiCommunicator, facts: OfText, source: Path) -> tuple[dict[str, Any], list[str]]:
    """Of a text, without drafts: these change no bit. Collective."""
    model = collectively(world, lambda: Llama(source, reproducible=True))
    with Session(
        world, model, facts.prompt,
        capacity=facts.capacity, sampling=facts.sampling, cache_dtype=facts.cache_dtype,
    ) as session:  # fmt: skip
        attended = Attended(model.config, session.capacity)
        made = generate(session, len(facts.tokens), attended=attended)
    differ = _unlike(facts.logits, made.digests)
    now, then = attended.digests(world), facts.attended
    first = first_difference(then, now) if differ and then else None
    found = {
        "recorded": facts.logits_sha256,
        "here": made.digest,
        "same": not differ,
        "tokens": made.tokens,
        "logits_differ": differ,
        "first_difference": first and first._asdict(),
    }
    lines = [f"the logits of token {differ[0]} of the text are the first that differ"] if differ else []
    if first:
        where = f"layer {first.layer}, heads {', '.join(map(str, first.heads))}"
        lines.append(
            f"attention differs first in {where}, of tokens {first.tokens[0]} to {first.tokens[1] - 1}"
        )
    return found, lines


def _read(recording: Path) -> OfStep | OfText:
    try:
        facts = json.loads(recording.read_text(encoding="utf-8"))
        if facts.get("logits"):
            return msgspec.convert(facts, OfText)
        return msgspec.convert(facts, OfStep)
    except OSError as error:
        raise ArgumentError(f"{recording}: cannot be read ({error.strerror})") from None
    except (AttributeError, ValueError, RecursionError):
        raise ArgumentError(
            f"{recording} is no recording: write one with decode, verify or generate --reproducible --json"
        ) from None


def _unlike(then: list[str], now: list[str]) -> list[int]:
    if len(then) != len(now):
        return list(range(max(len(then), len(now))))
    return [index for index, (one, other) in enumerate(zip(then, now, strict=True)) if one != other]
