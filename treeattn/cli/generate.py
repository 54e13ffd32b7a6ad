"""``treeattn generate``: continue a text with a Llama whose KV cache is sharded over the ranks of the job."""

from __future__ import annotations

import hashlib
import resource
import statistics
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from treeattn import communicators, files
from treeattn.agreement import collectively
from treeattn.cache_nodes import CacheNodes, connect
from treeattn.cli import options
from treeattn.cli.options import FILE, Output, grouped, number, read, whole_numbers
from treeattn.cli.own_device import own_device
from treeattn.cli.scheme import given, is_file
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.runtime.reducer import Sent
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import Decoder
from treeattn.decoder.request import Reduction
from treeattn.errors import ArgumentError
from treeattn.llama.config import Config
from treeattn.llama.drafts import Drafter, ModelDrafts, NgramDrafts
from treeattn.llama.generate import Continuation, Drafting, generate
from treeattn.llama.model import WEIGHT_DTYPES, WEIGHTS, Llama
from treeattn.llama.remote_session import RemoteSession
from treeattn.llama.sampling import Sampling
from treeattn.llama.session import CACHE_DTYPES, Session
from treeattn.llama.thread_limits import ThreadLimits
from treeattn.llama.tokenizer import Tokenizer
from treeattn.report import Progress, Report
from treeattn.shards import Layout
from treeattn.study import environment


class Source(NamedTuple):
    """The one option of these that says what the prompt is, and how many of its first tokens count."""

    prompt: str | None
    prompt_file: Path | None
    prompt_ids: list[int] | None
    random_tokens: int | None
    prompt_tokens: int | None

    def read(self, directory: Path, config: Config, seed: int) -> tuple[Tokenizer | None, list[int]]:
        """Make the tokenizer of a model where text is asked for, and the prompt's tokens.

        Raises `ArgumentError`.
        """
        *names, _ = (f"--{name.replace('_', '-')}" for name in self._fields)
        if sum(value is not None for value in self[:-1]) != 1:
            raise ArgumentError(f"give one of {', '.join(names)}")
        vocabulary, longest = config.vocab_size, config.max_position_embeddings
        if self.prompt_ids is not None:
            return None, self._cut(self.prompt_ids)
        if (wanted := self.random_tokens) is not None:
            if wanted > longest:  # found out before they are drawn
                raise ArgumentError(
                    f"--random-tokens {wanted:,}: the model was made for at most {longest:,} tokens"
                )
            return None, self._cut(np.random.default_rng(seed).integers(0, vocabulary, wanted).tolist())
        tokenizer = Tokenizer(directory, vocabulary)
        text = self.prompt if self.prompt_file is None else files.read_text(self.prompt_file)
        return tokenizer, self._cut(tokenizer.encode(text or ""))

    def _cut(self, tokens: list[int]) -> list[int]:
        if (count := self.prompt_tokens) is None:
            return tokens
        if not 1 <= count <= len(tokens):
            raise ArgumentError(f"--prompt-tokens {count}: the prompt has {len(tokens):,} tokens")
        return tokens[:count]


#: Options that a command takes as one argument, a `Source`.
source_options = grouped(
    "source", Source,
    click.option("--prompt", help="The text to continue."),
    click.option("--prompt-file", type=FILE, help="A file that holds it."),
    click.option("--prompt-ids", callback=read(whole_numbers), metavar="N[,N..]",
                 help="Token numbers: no tokenizer is needed."),
    click.option("--random-tokens", callback=read(number), metavar="N",
                 help="A prompt of N random tokens, such as 32k."),
    click.option("--prompt-tokens", callback=read(number), metavar="N",
                 help="Only the first N tokens of the prompt, such as 4Ki."),
)  # fmt: skip


class TextStream:
    """Prints tokens as they come: whole characters, or numbers."""

    def __init__(self, tokenizer: Tokenizer | None, shown: bool) -> None:
        self._tokenizer, self.shown = tokenizer, shown
        self._printed, self._text, self._count = "", "", 0

    def __call__(self, tokens: list[int]) -> None:
        """All tokens so far; what is new is printed."""
        if self._tokenizer is None:
            new = ",".join(map(str, tokens[self._count :]))
            self._print(f",{new}" if self._count else new)
        else:
            self._text = self._tokenizer.decode(tokens)
            if not self._text.endswith("\ufffd"):  # the rest of a character is still to come
                self._print(self._text[len(self._printed) :])
                self._printed = self._text
        self._count = len(tokens)

    def end(self) -> None:
        """The end of the text, perhaps within a character."""
        self._print(self._text[len(self._printed) :] + "\n")

    def _print(self, text: str) -> None:
        if self.shown:
            print(text, end="", flush=True)


_RINGS = ("kv_ring", "query_ring")

_sampling_options = options.grouped(
    "sampling", Sampling,
    click.option("--temperature", type=float, default=0.0,
                 help="Draw tokens, by logits divided by this; 0: the likeliest."),
    click.option("--top-k", type=int, default=0, help="Of so many of the likeliest; 0: all."),
    click.option("--top-p", type=float, default=1.0, help="Of the fewest that are so likely together."),
    click.option("--seed", type=options.SEED, default=0, help="Of what is drawn, and of random tokens."),
)  # fmt: skip


@click.command("generate")
@click.option("--model", "directory", required=True, type=FILE,
              help="A directory with config.json, safetensors and perhaps tokenizer.json.")  # fmt: skip
@source_options
@click.option("-n", "--max-new-tokens", type=click.IntRange(1), default=16)
@click.option("--decode", type=click.Choice(["tree", *_RINGS]), default="tree",
              help="tree: partials are reduced by --scheme; else a ring.")  # fmt: skip
@click.option("--scheme",
              help="Of --decode tree, or FILE.json; sharded weights: head_scatter unless said.")  # fmt: skip
@click.option("--cache-nodes", "remote", is_flag=True,
              help="Keys and values lie on the other ranks, which run treeattn cache-node.")  # fmt: skip
@click.option("--weights", type=click.Choice(WEIGHTS), default="replicated",
              help="sharded: each rank reads and holds a part.")  # fmt: skip
@click.option("--weight-dtype", type=click.Choice(WEIGHT_DTYPES),
              help="Round matrices to it, by rows: fewer bytes a token, other logits.")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu",
              help="Where each rank computes, and holds weights and cache.")  # fmt: skip
@click.option("--transport",
              help="How attention's records travel: mpi; of GPUs nccl, peer, cuda-mpi or host.")  # fmt: skip
@click.option("--draft", type=click.Choice(["ngram"]),
              help="Verify drafts found in the text, several at once.")  # fmt: skip
@click.option("--draft-model", type=FILE, help="Verify what this small model says.")
@click.option("--draft-tokens", type=click.IntRange(1, 64), default=7, help="Drafts of a step, at most.")
@options.layout_option("zigzag")
@_sampling_options
@click.option("--cache-dtype", type=click.Choice(CACHE_DTYPES),
              help="Of keys and values: that of the weights unless said.")  # fmt: skip
@click.option("--save-cache", type=FILE, metavar="DIR", help="Save the prompt's keys and values.")
@click.option("--load-cache", type=FILE, metavar="DIR",
              help="Take those of the prompt's beginning from there, saved on any ranks.")  # fmt: skip
@click.option("--reproducible", is_flag=True,
              help="Bits of logits are the text's alone: not of ranks, layout or drafts.")  # fmt: skip
@click.option("--ignore-eos", is_flag=True, help="Go on after a token that ends the text.")
@click.option("--repeat", type=options.COUNT, default=1, help="All of it, so often.")
@options.output_options(wide=False, json="Write everything measured.")
def command(
    directory: Path,
    source: Source,
    max_new_tokens: int,
    decode: str,
    scheme: str | None,
    remote: bool,
    weights: str,
    weight_dtype: str | None,
    device: str,
    transport: str | None,
    draft: str | None,
    draft_model: Path | None,
    draft_tokens: int,
    layout: Layout,
    sampling: Sampling,
    cache_dtype: str | None,
    save_cache: Path | None,
    load_cache: Path | None,
    reproducible: bool,
    ignore_eos: bool,
    repeat: int,
    output: Output,
) -> int:
    """Continue a prompt: text on stdout as it comes, what was measured on stderr.

    Every rank holds the keys and values of its share of the tokens, and the model, all of it or a share.
    Without a tokenizer (--prompt-ids, --random-tokens) token numbers are printed.
    """
    nodes: CacheNodes | None = None
    if remote:
        asked = {
            "--decode": decode != "tree",
            "--weights": weights == "sharded",
            "--device": device != "cpu",
            "--transport": transport,
            "--cache-dtype": cache_dtype,
            "--save-cache": save_cache,
            "--load-cache": load_cache,
            "--reproducible": reproducible,
        }
        if unserved := [name for name, value in asked.items() if value]:
            raise ArgumentError(f"{', '.join(unserved)} and --cache-nodes do not go together")
        nodes = connect(communicators.world(), scheme=scheme)
        world = communicators.alone()
    else:
        world = options.world()
    if draft and draft_model:
        raise ArgumentError("--draft and --draft-model are two ways to find drafts: take one")
    if scheme is not None and decode != "tree":
        raise ArgumentError(f"--scheme {scheme:.40} is of --decode tree: a ring has none")
    chosen: str | Schedule | None = scheme or ("head_scatter" if weights == "sharded" else None)
    if scheme is not None and is_file(scheme):
        (chosen,) = given(world, scheme)
    output.open(world=world)
    _, shared = own_device(world, device)
    cores = ThreadLimits(world)
    made_of: dict[str, Any] = {"device": device, "reproducible": reproducible, "weight_dtype": weight_dtype}
    if weights == "sharded":
        model = Llama(directory, world, **made_of)
    else:
        model = collectively(world, lambda: Llama(directory, **made_of, mapped=cores.ranks > 1))

    def read() -> tuple[Tokenizer | None, list[int]]:
        """Text is rank 0's business."""
        return (None, []) if world.rank else source.read(directory, model.config, sampling.seed)

    tokenizer, tokens = collectively(world, read)
    with watchdog.Activity("the prompt"):
        tokens = world.bcast(tokens)
    capacity = len(tokens) + max_new_tokens - 1  # the last token is not attended to
    how = Reduction(chosen if decode == "tree" else decode, transport)
    settings: dict[str, Any] = {
        "capacity": capacity,
        "scheme": how,
        "layout": str(layout),
        "drafts": draft_tokens + 1 if draft or draft_model else 0,
        "sampling": sampling,
        "cache_dtype": cache_dtype,
    }
    stop = () if ignore_eos else model.config.eos
    runs = []
    for turn in range(repeat):
        stream = TextStream(tokenizer, world.rank == 0 and turn == 0)
        drafts = collectively(world, lambda: _drafter(world.rank, draft_model, model, capacity))
        if nodes is None:
            made: Session = Session(world, model, tokens, **settings)
        else:
            made = RemoteSession(nodes, model, tokens, capacity=capacity, sampling=sampling)
        with made as session, drafts as drafter:
            drafting = Drafting(settings["drafts"], drafter) if settings["drafts"] else None
            what = max_new_tokens, stop, drafting, stream, load_cache, save_cache
            runs.append(_run(world, session, *what))
            trees = session.tree_decoder
            planned = {
                "cache_dtype": session.decoder.shape.dtype,
                "scheme": session.decoder.scheme,
                "transport": session.decoder.transport,
                "tree_scheme": None if trees is None else trees.scheme,
            }
    with watchdog.Activity("what was measured"):
        facts = _facts(world, model, tokens, settings | planned, runs)
    facts["prefill"] = "ring" if load_cache is None else f"loaded from {load_cache}"
    facts |= {
        "model": str(directory),
        "weights": weights,
        "weight_dtype": weight_dtype,
        "draft": draft or (draft_model and str(draft_model)),
    }
    facts |= {"sampling": asdict(sampling), "blas_threads": cores.blas_threads}
    facts |= {"device": device, "head_dim": session.decoder.shape.head_dim}
    if nodes is not None:
        facts["prefill"] = f"on {nodes.size} cache nodes"
        nodes.close()
    if world.rank == 0:
        report = Report(facts)
        for line in _lines(facts):
            report.text(line)
        report.note(environment.warning(facts["ranks"]))
        report.note(shared)
        output.report(report, sys.stderr)
    return 0


def _drafter(
    rank: int, draft_model: Path | None, model: Llama, capacity: int
) -> AbstractContextManager[Drafter | None]:
    if rank or draft_model is None:
        return nullcontext(None if rank else NgramDrafts())
    return ModelDrafts(draft_model, model.config.vocab_size, capacity, device=model.device.name)


def _run(
    world: MpiCommunicator,
    session: Session,
    count: int,
    stop: tuple[int, ...],
    drafting: Drafting | None,
    stream: TextStream,
    load: Path | None,
    save: Path | None,
) -> dict[str, Any]:
    """Prefill and decode once. Collective."""
    say = Progress(world.rank == 0)

    def told(made: Continuation) -> None:
        stream(made.tokens)
        if not stream.shown and made.step_s:  # where text is shown, it is the progress
            rate = 1 / statistics.median(made.step_s)
            say(f"{len(made.tokens):,} of {count:,} tokens, {rate:.1f} steps a second")

    made = generate(session, count, stop, drafting, told, say, load, save)
    stream.end()
    mine = {
        "attention_s": made.attention_s if session.model.device.name == "cpu" else None,
        "cache_bytes": session.cache_bytes,
        "sent_bytes": _sent(session, session.decoder),
        "tree_bytes": _sent(session, session.tree_decoder),
    }
    with watchdog.Activity("what was measured"):
        everyones = world.allgather(mine)
    return {
        "tokens": made.tokens,
        "logits_sha256": made.digest,
        "first_token_s": made.first_token_s,
        "step_s": made.step_s,
        "accepted": made.accepted,
        **{name: [one[name] for one in everyones] for name in mine},
    }


def _sent(session: Session, decoder: Decoder | None) -> int | None:
    """Bytes of attention that this rank hands over in a step; None where only the library knows."""
    sent = None if decoder is None else decoder.sent
    if sent is None:
        return None
    layers = session.model.config.layers
    return layers * (sent.bytes if isinstance(sent, Sent) else sum(size for _, size in sent))


def _facts(
    world: MpiCommunicator,
    model: Llama,
    prompt: list[int],
    settings: dict[str, Any],
    runs: list[dict[str, Any]],
) -> dict[str, Any]:
    """What is written and reported. Collective."""
    tokens = runs[0]["tokens"]
    for run in runs:
        if run["tokens"] != tokens:
            raise AssertionError(f"a repetition chose other tokens: {run['tokens']} and {tokens}")
    steps = sorted(step for run in runs for step in run["step_s"])
    return {
        **settings,
        "prompt_tokens": len(prompt),
        "tokens": tokens,
        "tokens_sha256": hashlib.sha256(np.array(tokens, np.int64).tobytes()).hexdigest(),
        "reproducible": model.reproducible,
        "logits_sha256": runs[0]["logits_sha256"] if model.reproducible else None,
        "weight_bytes": world.allgather(model.weight_bytes),
        "peak_bytes": world.allgather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        "first_token_s": [run["first_token_s"] for run in runs],
        "prefill_tokens_per_s": [len(prompt) / run["first_token_s"] for run in runs],
        "step_s": [run["step_s"] for run in runs],
        "step_p50_s": steps[len(steps) // 2] if steps else None,
        "step_p95_s": steps[min(len(steps) - 1, int(0.95 * len(steps)))] if steps else None,
        "attention_s": [run["attention_s"] for run in runs],
        "accepted": [run["accepted"] for run in runs],
        "cache_bytes": runs[0]["cache_bytes"],
        "sent_bytes_per_token": runs[0]["sent_bytes"],
        "sent_bytes_per_tree": runs[0]["tree_bytes"] if settings["drafts"] else None,
        "ranks": environment.placement(world),
        "software": environment.software() if world.rank == 0 else None,
    }


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    first, cache = statistics.median(facts["first_token_s"]), facts["cache_bytes"]
    prompt, sent = facts["prompt_tokens"], facts["sent_bytes_per_token"]
    rate = f"{prompt / first:,.0f} tokens/s, {facts['prefill']}"
    yield f"prompt   {prompt:,} tokens, first token after {first:.2f} s ({rate})"
    decode = "-"
    if facts["step_p50_s"] is not None:
        decode = f"{facts['step_p50_s'] * 1e3:.1f} ms a step (p95 {facts['step_p95_s'] * 1e3:.1f})"
    yield f"decode   {decode}, {facts['scheme']}{_travels(facts)}"
    yield from _accepted(facts)
    if facts["reproducible"]:
        yield f"logits   SHA-256 {facts['logits_sha256']}, on any ranks of like processors"
    wire = "known to the library only" if sent[0] is None else f"{max(sent):,} bytes a token and rank"
    if (trees := facts["sent_bytes_per_tree"]) is not None:
        wire += f", {'?' if trees[0] is None else format(max(trees), ',')} a tree ({facts['tree_scheme']})"
    yield f"cache    {min(cache):,} to {max(cache):,} bytes a rank; sent for attention: {wire}"
    host = " of the host's" if facts["device"] == "cuda" else ""
    peak = f"{max(facts['peak_bytes']):,} at most{host}"
    yield f"memory   {max(facts['weight_bytes']):,} bytes of weights, {peak}"


def _travels(facts: dict[str, Any]) -> str:
    """How records do, from GPUs."""
    if facts["device"] == "cpu" or len(facts["ranks"]) == 1:
        return ""
    sums = ", sums of the layers over host" if facts["weights"] == "sharded" else ""
    return f" over {facts['transport']}{sums}"


def _accepted(facts: dict[str, Any]) -> Iterator[str]:
    """What drafts were good for."""
    kept = [count for run in facts["accepted"] for count in run]
    if facts["drafts"] and kept:
        mean = statistics.mean(kept)
        yield f"drafts   {mean:.2f} of {facts['drafts'] - 1} accepted a step: {1 + mean:.2f} tokens each"
