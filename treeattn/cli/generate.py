"""``treeattn generate``: continue a text with a Llama whose KV cache is sharded over the ranks of the job."""

from __future__ import annotations

import hashlib
import statistics
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

from treeattn import comm as comm_
from treeattn import files
from treeattn.cli.console import Lines, number
from treeattn.collectives.reducer import Sent
from treeattn.errors import ArgumentError
from treeattn.llama.model import Llama
from treeattn.llama.prefill import PREFILLS
from treeattn.llama.session import Session
from treeattn.llama.threads import share_cores
from treeattn.llama.tokens import Tokenizer
from treeattn.shards import LAYOUTS
from treeattn.study import environment

__all__ = ["command"]

_RINGS = ("kv_ring", "query_ring")


@click.command("generate")
@click.option("--model", "directory", required=True, type=click.Path(path_type=Path),
              help="A directory with config.json, safetensors and perhaps tokenizer.json.")  # fmt: skip
@click.option("--prompt", help="The text to continue.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="A file that holds it.")
@click.option("--prompt-ids", metavar="N[,N..]", help="Token numbers: no tokenizer is needed.")
@click.option("--random-tokens", metavar="N", help="A prompt of N random tokens, such as 32k.")
@click.option("--prompt-tokens", metavar="N", help="Only the first N tokens of the prompt, such as 4Ki.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--decode", type=click.Choice(["tree", *_RINGS]), default="tree", show_default=True,
              help="tree: partials are reduced by --scheme; else a ring.")  # fmt: skip
@click.option("--scheme", default="hierarchical", show_default=True, help="Of --decode tree.")
@click.option("--prefill", type=click.Choice(list(PREFILLS)), default="ring", show_default=True)
@click.option("--layout", default="zigzag", show_default=True, metavar="|".join(LAYOUTS),
              help="Which tokens of the prompt go to which rank.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of random tokens.")
@click.option("--ignore-eos", is_flag=True, help="Go on after a token that ends the text.")
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="All of it, so often.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything measured.")
def command(
    directory: Path,
    prompt: str | None,
    prompt_file: Path | None,
    prompt_ids: str | None,
    random_tokens: str | None,
    prompt_tokens: str | None,
    max_new_tokens: int,
    decode: str,
    scheme: str,
    prefill: str,
    layout: str,
    seed: int,
    ignore_eos: bool,
    repeat: int,
    json_path: Path | None,
) -> int:
    """Continue a prompt, greedily: text on stdout as it comes, what was measured on stderr.

    Every rank holds the whole model in float32 and the keys and values of its share of the tokens. Without a
    tokenizer (--prompt-ids, --random-tokens) token numbers are printed.
    """
    world = comm_.world()
    sources = {"--prompt": prompt, "--prompt-file": prompt_file, "--prompt-ids": prompt_ids,
               "--random-tokens": random_tokens}  # fmt: skip
    options = [str(one) for one in (directory, *sources.values(), max_new_tokens, decode, scheme, seed)]
    options.append(str(prompt_tokens))
    comm_.agree(world, {"the command line": [*options, prefill, layout, ignore_eos, repeat]})

    def opened() -> tuple[Llama, Tokenizer | None, list[int], Any]:
        """Text is rank 0's business."""
        model = Llama(directory)
        if world.rank:
            return model, None, [], None
        tokenizer, tokens = _prompt(directory, model, sources, seed)
        return model, tokenizer, _cut(tokens, prompt_tokens), files.output_writer(json_path)

    model, tokenizer, tokens, write = comm_.together(world, opened)
    tokens = world.bcast(tokens)
    threads = share_cores(world)
    settings = {
        "capacity": len(tokens) + max_new_tokens,
        "scheme": scheme if decode == "tree" else decode,
        "prefill": prefill,
        "layout": layout,
    }
    runs = []
    for turn in range(repeat):
        stream = _Stream(tokenizer, world.rank == 0 and turn == 0)
        stop = () if ignore_eos else model.config.eos
        runs.append(_run(world, model, tokens, max_new_tokens, stop, settings, stream))
    facts = _facts(world, model, tokens, settings, runs) | {"blas_threads": threads}
    if world.rank == 0:
        write(environment.as_json(facts))
        _report(facts)
    return 0


def _prompt(
    directory: Path, model: Llama, sources: dict[str, Any], seed: int
) -> tuple[Tokenizer | None, list[int]]:
    """The tokenizer where text is asked for, and the tokens of the one source that was given."""
    given = {name: value for name, value in sources.items() if value is not None}
    if len(given) != 1:
        raise ArgumentError(f"give one of {', '.join(sources)}")
    ((name, value),) = given.items()
    vocabulary = model.config.vocab_size
    if name == "--random-tokens":
        drawn = np.random.default_rng(seed).integers(0, vocabulary, number(name, value))
        return None, drawn.tolist()
    if name == "--prompt-ids":
        if not all(one.strip().isdecimal() for one in value.split(",")):
            raise ArgumentError(f"--prompt-ids {value:.40}: whole numbers, separated by commas")
        return None, [int(one) for one in value.split(",")]
    tokenizer = Tokenizer(directory, vocabulary)
    return tokenizer, tokenizer.encode(value if name == "--prompt" else _text(value))


def _cut(tokens: list[int], asked: str | None) -> list[int]:
    """The first so many tokens of a prompt that has them."""
    if asked is None:
        return tokens
    count = number("--prompt-tokens", asked)
    if not 1 <= count <= len(tokens):
        raise ArgumentError(f"--prompt-tokens {asked}: the prompt has {len(tokens):,} tokens")
    return tokens[:count]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path}: cannot be read ({error})") from None


class _Stream:
    """Prints tokens as they come: whole characters, or numbers. A reader that goes away ends no rank."""

    def __init__(self, tokenizer: Tokenizer | None, shown: bool) -> None:
        self._tokenizer, self._shown = tokenizer, shown
        self._tokens: list[int] = []
        self._printed = ""

    def __call__(self, token: int) -> None:
        self._tokens.append(token)
        if self._tokenizer is None:
            self._print(("," if len(self._tokens) > 1 else "") + str(token))
            return
        text = self._tokenizer.decode(self._tokens)
        if not text.endswith("\ufffd"):  # the rest of a character is still to come
            self._print(text[len(self._printed) :])
            self._printed = text

    def end(self) -> None:
        self._print("\n")

    def _print(self, text: str) -> None:
        screen = sys.__stdout__
        if not self._shown or screen is None:
            return
        try:
            screen.write(text)
            screen.flush()
        except OSError:
            self._shown = False


def _run(
    world: Any,
    model: Llama,
    prompt: list[int],
    count: int,
    stop: tuple[int, ...],
    settings: dict[str, Any],
    stream: _Stream,
) -> dict[str, Any]:
    """Prefill and decode once. Collective."""
    clock, say = comm_.mpi().Wtime, Lines(world.rank == 0)
    with Session(world, model, prompt, **settings) as session:
        world.Barrier()
        began = clock()
        logits = session.prefill()
        chosen = [session.choose(logits)]
        first, steps = clock() - began, []
        stream(chosen[-1])
        while len(chosen) < count and chosen[-1] not in stop:
            began = clock()
            chosen.append(session.choose(session.step(chosen[-1])))
            steps.append(clock() - began)
            stream(chosen[-1])
            say(f"{len(chosen):,} of {count:,} tokens, {1 / statistics.median(steps):.1f} a second")
        stream.end()
        return {
            "tokens": chosen,
            "first_token_s": first,
            "step_s": steps,
            "cache_bytes": world.allgather(session.cache_bytes),
            "sent_bytes": world.allgather(_sent(session, model.config.layers)),
        }


def _sent(session: Session, layers: int) -> int | None:
    """Bytes that this rank hands over for a token; None where only the library knows."""
    sent = session.decoder.sent
    if sent is None:
        return None
    return layers * (sent.bytes if isinstance(sent, Sent) else sum(size for _, size in sent))


def _facts(
    world: Any, model: Llama, prompt: list[int], settings: dict[str, Any], runs: list[dict[str, Any]]
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
        "weight_bytes": model.weight_bytes,
        "first_token_s": [run["first_token_s"] for run in runs],
        "prefill_tokens_per_s": [len(prompt) / run["first_token_s"] for run in runs],
        "step_s": [run["step_s"] for run in runs],
        "step_p50_s": steps[len(steps) // 2] if steps else None,
        "step_p95_s": steps[min(len(steps) - 1, int(0.95 * len(steps)))] if steps else None,
        "cache_bytes": runs[0]["cache_bytes"],
        "sent_bytes_per_token": runs[0]["sent_bytes"],
        "ranks": environment.placement(world),
        "software": environment.software() if world.rank == 0 else None,
    }


def _report(facts: dict[str, Any]) -> None:
    first, cache = statistics.median(facts["first_token_s"]), facts["cache_bytes"]
    sent = facts["sent_bytes_per_token"]
    decode = "-"
    if facts["step_p50_s"] is not None:
        decode = f"{facts['step_p50_s'] * 1e3:.1f} ms a token (p95 {facts['step_p95_s'] * 1e3:.1f})"
    wire = "known to the library only" if sent[0] is None else f"{max(sent):,} bytes a token and rank"
    for line in (
        f"prompt   {facts['prompt_tokens']:,} tokens, first token after {first:.2f} s "
        f"({facts['prompt_tokens'] / first:,.0f} tokens/s, {facts['prefill']})",
        f"decode   {decode}, {facts['scheme']}",
        f"cache    {min(cache):,} to {max(cache):,} bytes a rank; sent: {wire}",
    ):
        print(line, file=sys.stderr)
    if warning := environment.warning(facts["ranks"]):
        print(f"note: {warning}", file=sys.stderr)
