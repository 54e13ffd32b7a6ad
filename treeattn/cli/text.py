"""The text that a model continues, and what it says: tokens from the command line, text on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from treeattn import files
from treeattn.cli.options import FILE, grouped, number, read, whole_numbers
from treeattn.errors import ArgumentError
from treeattn.llama.config import Config
from treeattn.llama.tokenizer import Tokenizer


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
