"""A message of the tree: 64 bytes that say what to do, then arrays, each from a multiple of 64 bytes on."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from treeattn.errors import ArgumentError
from treeattn.partial import Array

__all__ = ["LINE", "Head", "Kind", "Message", "Part", "message_bytes"]

LINE = 64

#: (shape, dtype) of an array in a message.
Part: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]]


class Kind(IntEnum):
    """What a message is: a step of one layer, or a call with arguments in JSON, which nothing runs."""

    STEP = 1
    CALL = 2


class Head(NamedTuple):
    """The first 64 bytes of a message, in eight int64.

    bytes: of the whole message. cache, layer: whose step it is. view: how it attends, a number of
    `RemoteCache`; -1: not at all. tokens: new ones of each sequence. counts, begins: whether these come too.
    """

    kind: int
    bytes: int
    cache: int = 0
    layer: int = 0
    view: int = -1
    tokens: int = 0
    counts: int = 0
    begins: int = 0


class Message:
    """Memory that messages are written to or land in, one after the other."""

    def __init__(self) -> None:
        self._views: dict[Hashable, tuple[Array, ...]] = {}
        self._make(1 << 16)

    def _make(self, size: int) -> None:
        whole = np.empty(size + LINE, np.uint8)
        self._all = whole[-whole.ctypes.data % LINE :][:size]
        self._head = self._all[:LINE].view(np.int64)
        self._views.clear()

    @property
    def head(self) -> Head:
        """What is there."""
        return Head(*self._head.tolist())

    @property
    def bytes(self) -> Array:
        """The whole message."""
        return self._all[: int(self._head[1])]

    def room(self, size: int) -> Array:
        """The first `size` bytes, for a message to land in."""
        if size > len(self._all):
            self._make(max(size, 2 * len(self._all)))
        return self._all[:size]

    def begin(self, head: Head) -> None:
        """Write the head of a new message."""
        self.room(head.bytes)
        self._head[:] = head

    def arrays(self, key: Hashable, arrays: tuple[Part, ...]) -> tuple[Array, ...]:
        """The arrays behind the head, as views. key: stands for `arrays`, and for nothing else."""
        views = self._views.get(key)
        if views is None:
            made, at = [], LINE
            for shape, dtype in arrays:
                size = _bytes(shape, dtype)
                made.append(self._all[at : at + size].view(dtype).reshape(shape))
                at += -(-size // LINE) * LINE
            views = self._views[key] = tuple(made)
        return views

    def call(self, name: str, arguments: dict[str, Any]) -> None:
        """Write a call. Raises `ArgumentError` for arguments that JSON does not have."""
        try:
            words = json.dumps((name, arguments), default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"this cannot be said to cache nodes: {error}") from None
        self.begin(Head(Kind.CALL, LINE + len(words)))
        self._all[LINE : LINE + len(words)] = np.frombuffer(words, np.uint8)

    def called(self) -> tuple[str, dict[str, Any]]:
        """The name and the arguments of a call."""
        name, arguments = json.loads(self.bytes[LINE:].tobytes())
        return name, arguments


def _plain(value: object) -> object:
    """NumPy's numbers and arrays as Python's, a dataclass as its fields."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TypeError(f"{value!r:.60} is no number, text, list or dict")


def message_bytes(arrays: tuple[Part, ...]) -> int:
    """Of a message with such arrays."""
    return LINE + sum(-(-_bytes(*array) // LINE) * LINE for array in arrays)


def _bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize
