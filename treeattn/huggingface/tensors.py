"""Tensors of transformers as arrays that treeattn reads where they lie, and back."""

from __future__ import annotations

import hashlib
from typing import Any

import ml_dtypes
import torch


def as_rows(states: torch.Tensor) -> Any:
    """[batch, heads, tokens, dim] as an array [batch, tokens, heads, dim], not copied: of NumPy, or of a GPU
    the tensor itself, which goes on by DLPack."""
    if states.requires_grad:
        states = states.detach()
    if states.device.type == "cuda":
        return states.transpose(1, 2)
    if states.dtype == torch.bfloat16:
        return states.view(torch.int16).numpy().view(ml_dtypes.bfloat16).swapaxes(1, 2)
    return states.numpy().swapaxes(1, 2)


def device_of(rows: Any) -> str:
    """Where what `as_rows` gave lies."""
    return "cuda" if isinstance(rows, torch.Tensor) else "cpu"


def as_tensor(array: Any) -> torch.Tensor:
    """A result of treeattn as a tensor, not copied."""
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)


def finished(out: Any, lse: Any, sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """With the sink of each head, which has no value: exp(lse) / (exp(lse) + exp(sink)) of the result."""
    if sinks is None:
        return as_tensor(out).to(dtype, copy=True)  # models keep it, a decoder writes its own again
    share = torch.sigmoid(as_tensor(lse) - sinks.detach().float()[None, :, None])
    return (as_tensor(out) * share.transpose(1, 2)[..., None]).to(dtype)


def dtype_name(tensor: Any) -> str:
    """The name of the dtype of a tensor or an array, such as "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def digest(ids: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """What ranks compare instead of ids."""
    words = ids.cpu().contiguous().numpy().tobytes()
    return tuple(ids.shape), hashlib.blake2b(words, digest_size=8).hexdigest()
