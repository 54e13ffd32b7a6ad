"""``treeattn generate``: continue a text with a Llama whose KV cache is sharded over the ranks of the job."""

from __future__ import annotations

import hashlib
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from treeattn import files
from treeattn.cli import options
from treeattn.cli.options import FILE, Output, read, whole_numbers
from treeattn.cli.scheme import given, is_file
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import Decoder
from treeattn.decoder.request import Reduction
from treeattn.errors import ArgumentError
from treeattn.llama.drafts import NgramDrafts
from treeattn.llama.generate import Continuation, generate
from treeattn.llama.model import WEIGHTS, Llama
from treeattn.llama.session import Session
from treeattn.llama.thread_limits import ThreadLimits
from treeattn.llama.tokenizer import Tokenizer
from treeattn.mpi.communicators import MpiCommunicator, collectively
from treeattn.report import Progress, Report
from treeattn.study import environment

_RINGS = ("kv_ring", "query_ring")
_NODES = 8  # of a tree of drafts: the last token, and seven that may follow


@click.command("generate")
@click.option("--model", "directory", required=True, type=FILE,
              help="A directory with config.json, safetensors and perhaps tokenizer.json.")  # fmt: skip
@click.option("--prompt", help="The text to continue.")
@click.option("--prompt-file", type=FILE, help="A file that holds it.")
@click.option("--prompt-ids", callback=read(whole_numbers), metavar="N[,N..]",
              help="Token numbers: no tokenizer is needed.")  # fmt: skip
@click.option("-n", "--max-new-tokens", type=click.IntRange(1), default=16)
@click.option("--decode", type=click.Choice(["tree", *_RINGS]), default="tree",
              help="tree: partials are reduced by --scheme; else a ring.")  # fmt: skip
@click.option("--scheme",
              help="Of --decode tree, or FILE.json; sharded weights: head_scatter unless said.")  # fmt: skip
@click.option("--weights", type=click.Choice(WEIGHTS), default="replicated",
              help="sharded: each rank reads and holds a part.")  # fmt: skip
@click.option("--draft", type=click.Choice(["ngram"]),
              help="Verify drafts found in the text, several at once.")  # fmt: skip
@options.DEVICE
@click.option("--transport",
              help="How attention's records travel: mpi; of GPUs nccl, peer, cuda-mpi or host.")  # fmt: skip
@options.output_options(json="Write everything measured.")
def command(
    directory: Path,
    prompt: str | None,
    prompt_file: Path | None,
    prompt_ids: list[int] | None,
    max_new_tokens: int,
    decode: str,
    scheme: str | None,
    weights: str,
    draft: str | None,
    device: str,
    transport: str | None,
    output: Output,
) -> int:
    """Continue a prompt: text on stdout as it comes, what was measured on stderr.

    Every rank holds the keys and values of its share of the tokens, and the model, all of it or a share.
    Of --prompt-ids token numbers are printed.
    """
    world = options.world()
    if scheme is not None and decode != "tree":
        raise ArgumentError(f"--scheme {scheme:.40} is of --decode tree: a ring has none")
    chosen: str | Schedule | None = "head_scatter" if weights == "sharded" and scheme is None else scheme
    if scheme is not None and is_file(scheme):
        (chosen,) = given(world, scheme)
    output.open(world=world)
    _, shared = options.own_device(world, device)
    cores = ThreadLimits(world)
    if weights == "sharded":
        model = Llama(directory, world, device=device)
    else:
        model = collectively(world, lambda: Llama(directory, device=device, mapped=cores.ranks > 1))

    def tokens_of_prompt() -> tuple[Callable[[list[int]], str], list[int]]:
        """Text is rank 0's business."""
        if sum(one is not None for one in (prompt, prompt_file, prompt_ids)) != 1:
            raise ArgumentError("give one of --prompt, --prompt-file, --prompt-ids")
        if prompt_ids is not None or world.rank:
            return lambda tokens: ",".join(map(str, tokens)), prompt_ids or []
        tokenizer = Tokenizer(directory, model.config.vocab_size)
        text = prompt if prompt_file is None else files.read_text(prompt_file)
        return tokenizer.decode, tokenizer.encode(text or "")

    text_of, tokens = collectively(world, tokens_of_prompt)
    with watchdog.Activity("the prompt"):
        tokens = world.bcast(tokens)
    planned: dict[str, Any] = {
        "capacity": len(tokens) + max_new_tokens - 1,  # the last token is not attended to
        "scheme": Reduction(chosen if decode == "tree" else decode, transport),
        "drafts": _NODES if draft else 0,
    }
    with Session(world, model, tokens, **planned) as session:
        drafter = NgramDrafts() if draft and world.rank == 0 else None
        stream = TextStream(text_of)
        made = generate(
            session, max_new_tokens, model.config.eos, drafter, lambda made: stream(made.tokens),
            Progress(world.rank == 0),
        )  # fmt: skip
        stream.end()
        facts = {
            "model": str(directory),
            "weights": weights,
            "draft": draft,
            "drafts": planned["drafts"],
            "device": device,
            "capacity": planned["capacity"],
            "blas_threads": cores.blas_threads,
            **_measured(world, session, made),
        }
    if world.rank == 0:
        report = Report(facts)
        for line in _lines(facts):
            report.text(line)
        report.note(environment.warning(facts["ranks"]))
        report.note(shared)
        output.report(report, sys.stderr)
    return 0


class TextStream:
    """Prints the text of tokens as they come, whole characters each time."""

    def __init__(self, text_of: Callable[[list[int]], str]) -> None:
        self._text_of, self._text, self._printed = text_of, "", ""

    def __call__(self, tokens: list[int]) -> None:
        """All tokens so far; what is new is printed."""
        self._text = self._text_of(tokens)
        if not self._text.endswith("\ufffd"):  # the rest of a character is still to come
            print(self._text[len(self._printed) :], end="", flush=True)
            self._printed = self._text

    def end(self) -> None:
        """The end of the text, perhaps within a character."""
        print(self._text[len(self._printed) :], flush=True)


def _peak_bytes() -> int:
    """Of this program's pages; getrusage counts those of its parent, too, out of which it was forked."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _measured(world: MpiCommunicator, session: Session, made: Continuation) -> dict[str, Any]:
    """What was measured on all ranks, seconds on this one. Collective."""
    steps, prompt = sorted(made.step_s), len(session.prompt_tokens)
    mine = {
        "attention_s": made.attention_s if session.model.device.name == "cpu" else None,
        "cache_bytes": session.cache_bytes,
        "weight_bytes": session.model.weight_bytes,
        "peak_bytes": _peak_bytes(),
        "sent_bytes_per_token": _sent(session, session.decoder),
        "sent_bytes_per_tree": _sent(session, session.tree_decoder),
    }
    with watchdog.Activity("what was measured"):
        everyones = world.allgather(mine)
        ranks = environment.placement(world)
    trees = session.tree_decoder
    return {
        "cache_dtype": session.decoder.shape.dtype,
        "head_dim": session.decoder.shape.head_dim,
        "scheme": session.decoder.scheme,
        "transport": session.decoder.transport,
        "tree_scheme": None if trees is None else trees.scheme,
        "prompt_tokens": prompt,
        "tokens": made.tokens,
        "tokens_sha256": hashlib.sha256(np.array(made.tokens, np.int64).tobytes()).hexdigest(),
        "first_token_s": made.first_token_s,
        "prefill_tokens_per_s": prompt / made.first_token_s,
        "step_s": made.step_s,
        "step_p50_s": steps[len(steps) // 2] if steps else None,
        "step_p95_s": steps[min(len(steps) - 1, int(0.95 * len(steps)))] if steps else None,
        "accepted": made.accepted,
        **{name: [one[name] for one in everyones] for name in mine},
        "ranks": ranks,
        "software": environment.software() if world.rank == 0 else None,
    }


def _sent(session: Session, decoder: Decoder | None) -> int | None:
    """Bytes of attention that this rank hands over in a step; None where only the library knows."""
    sent = None if decoder is None else decoder.sent
    if sent is None:
        return None
    layers = session.model.config.layers
    return layers * (sent if isinstance(sent, int) else sum(size for _, size in sent))


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    cache, sent, trees = (facts[n] for n in ("cache_bytes", "sent_bytes_per_token", "sent_bytes_per_tree"))
    took = f"first token after {facts['first_token_s']:.2f} s ({facts['prefill_tokens_per_s']:,.0f} tokens/s)"
    yield f"prompt   {facts['prompt_tokens']:,} tokens, {took}"
    decode = "-"
    if facts["step_p50_s"] is not None:
        decode = f"{facts['step_p50_s'] * 1e3:.1f} ms a step (p95 {facts['step_p95_s'] * 1e3:.1f})"
    over = f" over {facts['transport']}" if facts["device"] == "cuda" and len(facts["ranks"]) > 1 else ""
    yield f"decode   {decode}, {facts['scheme']}{over}"
    if facts["drafts"] and facts["accepted"]:
        mean = statistics.mean(facts["accepted"])
        yield f"drafts   {mean:.2f} of {facts['drafts'] - 1} accepted a step: {1 + mean:.2f} tokens each"
    wire = "known to the library only" if sent[0] is None else f"{max(sent):,} bytes a token and rank"
    if facts["drafts"]:
        wire += f", {'?' if trees[0] is None else format(max(trees), ',')} a tree ({facts['tree_scheme']})"
    yield f"cache    {min(cache):,} to {max(cache):,} bytes a rank; sent for attention: {wire}"
    host = " of the host's" if facts["device"] == "cuda" else ""
    peak = f"{max(facts['peak_bytes']):,} at most{host}"
    yield f"memory   {max(facts['weight_bytes']):,} bytes of weights, {peak}"
