"""Tensors of transformers as treeattn takes them, and back."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import weakref
from typing import Any

import numpy as np
import torch

from treeattn.backends.cuda.runtime import default_runtime
from treeattn.errors import ArgumentError

#: Of operators that a CUDA graph would not run again: they append, send and read masks from the host. torch
#: then captures what lies between them.
NO_GRAPH = (torch.Tag.cudagraph_unsafe,)


_handles = itertools.count(1)
_of_handle: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def handle_of(one: Any) -> int:
    """A number by which a compiled model names it while it lives."""
    number = next(_handles)
    _of_handle[number] = one
    return number


def of_handle(handle: int) -> Any:
    """What a compiled model names so; None for 0."""
    return _of_handle[handle] if handle else None


@torch._dynamo.assume_constant_result
def refuse(message: str) -> None:
    """Raise `ArgumentError`, of a model that is traced while it is: torch then shows the line, which it hides
    where it traces an error."""
    raise ArgumentError(message)


def torchs_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Queue what is done within to the stream on which torch computes now, and not to CuPy's."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return default_runtime().on_stream(torch.cuda.current_stream(device).cuda_stream)


def as_rows(states: torch.Tensor) -> Any:
    """[batch, heads, tokens, dim] as [batch, tokens, heads, dim], not copied."""
    return states.detach().transpose(1, 2)


def as_tensor(array: Any) -> torch.Tensor:
    """A result of treeattn as a tensor, not copied."""
    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array)
    return torch.from_dlpack(array)


def finished(out: Any, lse: Any, sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """With the sink of each head, which has no value: exp(lse) / (exp(lse) + exp(sink)) of the result."""
    if sinks is not None:
        share = torch.sigmoid(lse - sinks.detach().float()[None, :, None])
        out = out * share.transpose(1, 2)[..., None]
    made: torch.Tensor = out.to(dtype, copy=sinks is None)  # models keep it, a decoder writes its own again
    return made


def all_heads(comm: Any, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors [batch, tokens, own heads, dim] with the heads of all ranks, in one message. Collective."""
    ranks = zip(*comm.allgather([one.cpu().contiguous() for one in own]), strict=True)
    return tuple(torch.cat(parts, 2).to(own[0].device) for parts in ranks)


def digest(ids: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """What ranks compare instead of ids."""
    words = ids.cpu().contiguous().numpy().tobytes()
    return tuple(ids.shape), hashlib.blake2b(words, digest_size=8).hexdigest()
