"""A message of the tree, in MessagePack: a step of one layer, or a call with its arguments."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np

from treeattn.errors import ArgumentError, TransportError
from treeattn.partial import Array


class LayerStep(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """cache, layer: whose step it is. view: how it attends, a number of `RemoteCache`; None: not at all.
    tokens: new ones of each sequence. counts, begins: of each sequence, where they are not all alike. arrays:
    the bytes of q, unless it does not attend, and of new k and v."""

    cache: int
    layer: int
    view: int | None
    tokens: int
    counts: list[int] | None
    begins: list[int] | None
    arrays: list[memoryview]


class Call(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """A method of a node, by its name."""

    name: str
    arguments: dict[str, Any]


NodeMessage: TypeAlias = LayerStep | Call
_decoder = msgspec.msgpack.Decoder(NodeMessage)


def encode(message: NodeMessage) -> bytes:
    """Raises `ArgumentError` for arguments that no message can have."""
    try:
        return msgspec.msgpack.encode(message, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ArgumentError(f"this cannot be said to cache nodes: {error}") from None


def decode(given: bytearray) -> NodeMessage:
    """The arrays of a step stay in `given`. Raises `TransportError` for what is no message."""
    try:
        message: NodeMessage = _decoder.decode(given)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(f"a message to cache nodes is damaged or not whole: {error}") from None
    return message


def array_of(given: memoryview, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array of a step, over the message's memory. Raises `TransportError` for other sizes."""
    try:
        return np.frombuffer(given, dtype).reshape(shape)
    except ValueError as error:
        raise TransportError(f"a message to cache nodes has other arrays than it says: {error}") from None


def bytes_of(array: Array) -> memoryview:
    """The bytes of an array in a step, copied only where it does not lie in one piece."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _plain(value: object) -> object:
    """NumPy's numbers and arrays as Python's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{value!r:.60} is no number, text, list or dict")
