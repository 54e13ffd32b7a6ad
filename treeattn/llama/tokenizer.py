"""Text to tokens and back, by the `tokenizers` library: the extra ``models``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treeattn.errors import ArgumentError, MissingPackageError


class Tokenizer:
    """The ``tokenizer.json`` of a model directory.

    Raises `ArgumentError` where there is none, or it has tokens that the model does not know;
    `BackendError` without the library.
    """

    def __init__(self, directory: str | Path, vocab_size: int) -> None:
        try:
            from tokenizers import Tokenizer as Reader
        except ImportError:
            raise MissingPackageError(
                "text needs the tokenizers library: pip install 'treeattn[models]', or pass --prompt-ids"
            ) from None
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise ArgumentError(f"{path}: no such file: pass --prompt-ids, which needs no tokenizer")
        try:
            self._reader: Any = Reader.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ArgumentError(f"{path}: is not a tokenizer ({error!s:.80})") from None
        self._reader.no_truncation()  # a file may ask for both, for the batches of a training
        self._reader.no_padding()
        known = self._reader.get_vocab_size()
        if known > vocab_size:
            raise ArgumentError(
                f"{path}: has {known} tokens, config.json's vocab_size is {vocab_size}: "
                "they belong to different models"
            )

    def encode(self, text: str) -> list[int]:
        """Token numbers of a text, with what the tokenizer puts before it."""
        numbers: list[int] = self._reader.encode(text).ids
        return numbers

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; bytes that are no character yet become U+FFFD."""
        text: str = self._reader.decode(tokens)
        return text
