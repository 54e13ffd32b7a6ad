"""The text that a model continues, and what it says: tokens from the command line, text on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from treeattn.cli.console import number
from treeattn.errors import ArgumentError
from treeattn.llama.config import Config
from treeattn.llama.tokenizer import Tokenizer

__all__ = ["Stream", "prompt"]


def prompt(
    directory: Path, config: Config, sources: dict[str, Any], seed: int, first: str | None
) -> tuple[Tokenizer | None, list[int]]:
    """The tokenizer where text is asked for, and the tokens of the one source that was given; only the first
    so many where `first` says so. Raises `ArgumentError`."""
    vocabulary, longest = config.vocab_size, config.max_position_embeddings
    given = {name: value for name, value in sources.items() if value is not None}
    if len(given) != 1:
        raise ArgumentError(f"give one of {', '.join(sources)}")
    ((name, value),) = given.items()
    if name == "--random-tokens":
        if (wanted := number(name, value)) > longest:  # found out before they are drawn
            raise ArgumentError(f"{name} {value}: the model was made for at most {longest:,} tokens")
        drawn = np.random.default_rng(seed).integers(0, vocabulary, wanted)
        return None, _cut(drawn.tolist(), first)
    if name == "--prompt-ids":
        if not all(one.strip().isdecimal() and len(one) <= 18 for one in value.split(",")):
            raise ArgumentError(f"--prompt-ids {value:.40}: whole numbers, separated by commas")
        return None, _cut([int(one) for one in value.split(",")], first)
    tokenizer = Tokenizer(directory, vocabulary)
    return tokenizer, _cut(tokenizer.encode(value if name == "--prompt" else _read(value)), first)


def _cut(tokens: list[int], first: str | None) -> list[int]:
    if first is None:
        return tokens
    count = number("--prompt-tokens", first)
    if not 1 <= count <= len(tokens):
        raise ArgumentError(f"--prompt-tokens {first}: the prompt has {len(tokens):,} tokens")
    return tokens[:count]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path}: cannot be read ({error})") from None


class Stream:
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
