"""Attention of prompts on a GPU by torch's own kernel, where it serves: out and lse, which it makes of a
block, are a record, and records are merged here as any others.

flex_attention gives both, too, but has to be compiled: as it is called here it would hold all scores.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from treeattn.decoder.gpu_reducers import say
from treeattn.decoder.prefill import BlockKernel
from treeattn.huggingface.plans import Scoring


def serves(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, begins: Any, rank: int | None
) -> bool:
    """Whether causal attention of these, [batch, tokens, heads, dim] on a GPU, is torch's. Rank 0 says once
    which it is, and why."""
    if q.device.type == "cpu":
        return False
    if scoring.window or scoring.softcap or begins is not None:
        problem: str | None = "a window, a softcap, or padding"
    elif q.element_size() != 2 or v.shape[3] != q.shape[3]:
        problem = f"{q.dtype} with heads of {q.shape[3]} and {v.shape[3]}"
    else:
        problem = _tried(q.device, q.dtype, q.shape[3])
    if rank == 0:
        by = f"treeattn's own kernels: {problem}" if problem else "torch.nn.attention.varlen"
        say(f"prompts attend by {by}")
    return problem is None


@functools.cache
def _tried(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why it does not give what is asked of it, here of 3 queries that see 2, 3 and 4 keys alike; None: it
    does."""
    q, k = (torch.zeros(1, tokens, heads, width, dtype=dtype) for tokens, heads in ((3, 2), (4, 1)))
    v, seen = torch.arange(4.0)[None, :, None, None].expand(k.shape).to(dtype), torch.arange(2.0, 5)
    try:
        both = attend(q.to(device), k.to(device), v.to(device), True, 1.0)
        out, lse = (one.float().cpu() for one in both)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]:.120}"
    same = torch.allclose(lse, seen.log(), 0.01) and torch.allclose(out.transpose(1, 3), (seen - 1) / 2, 0.01)
    return None if same else "varlen_attn gives something else"


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [batch, queries, heads, dim], in q's type, and lse [batch, heads, queries] of q over k and v
    [batch, tokens, kv_heads, dim]; causal: the last query sees the last key."""
    from torch.nn.attention import varlen  # of torch 2.10 and newer

    batch, queries, heads, _ = q.shape
    rows = (one.flatten(0, 1) for one in (q, k, v))
    ends = (torch.arange(batch + 1, dtype=torch.int32, device=q.device) * one.shape[1] for one in (q, k))
    how: Any = {"scale": scale, "enable_gqa": heads != k.shape[2], "window_size": (-1, 0 if causal else -1)}
    how["return_aux"] = varlen.AuxRequest(lse=True)
    call: Any = varlen.varlen_attn
    out, lse = call(*rows, *ends, queries, k.shape[1], **how)
    return out.view(q.shape), lse.reshape(heads, batch, queries).transpose(0, 1)


def block_kernel(dtype: torch.dtype, scale: float) -> BlockKernel:
    """For a `Prefill`: `attend`, whose result is written as records."""

    def write(q: Any, k: Any, v: Any, causal: bool, records: Any) -> None:
        bits = (one.view(f"i{one.dtype.itemsize}") for one in (q, k, v))  # not all have a bfloat16
        made, q, k, v = map(torch.from_dlpack, (records, *bits))  # type: ignore[attr-defined]
        unseen = made.shape[2] - q.shape[1]
        out, lse = attend(q.view(dtype), k.view(dtype), v.view(dtype), causal, scale)
        made[:, :, :unseen] = 0
        made[:, :, :unseen, 0] = -torch.inf
        made[:, :, unseen:, 0], made[:, :, unseen:, 1] = lse, 1
        made[:, :, unseen:, 2:] = out.transpose(1, 2)

    return write
