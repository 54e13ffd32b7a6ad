"""Attention of prompts on a GPU by torch's own kernel, where it serves: out and lse, which it makes of a
block, are a record, and records are merged here as any others.

flex_attention gives both, too, but has to be compiled: as it is called here it would hold all scores.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
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
    """Why it does not give what is asked of it, here of two rows of 3 queries and 4 keys; None: it does."""
    draw, shapes = np.random.default_rng(0).standard_normal, ((3, 4), (4, 2), (4, 2))
    given = [torch.from_numpy(draw((2, *shape, width))).to(dtype) for shape in shapes]
    q, k, v = (one.double().transpose(1, 2).repeat_interleave(4 // one.shape[2], 1) for one in given)
    logits = q @ k.mT * 0.5
    logits.masked_fill_(logits.new_ones(3, 4).triu(2).bool(), -torch.inf)
    try:
        both = attend(given[0].to(device), given[1].to(device), given[2].to(device), True, 0.5)
        out, lse = (one.double().cpu() for one in both)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]:.120}"
    wanted = (out, (logits.softmax(3) @ v).transpose(1, 2)), (lse, logits.logsumexp(3))
    same = all(torch.allclose(*both, rtol=0.02, atol=0.03) for both in wanted)
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
    how: Any = {"scale": scale, "enable_gqa": heads != k.shape[2]}
    # Of one query without a window, FlashAttention-2 makes queries of grouped heads and mixes up their lse.
    how["window_size"] = (-1, 0 if causal or queries == 1 else -1)
    call: Any = varlen.varlen_attn
    out, lse = call(*rows, *ends, queries, k.shape[1], return_aux=varlen.AuxRequest(lse=True), **how)
    return out.view(q.shape), lse.reshape(heads, batch, queries).transpose(0, 1)


def block_kernel(dtype: torch.dtype, scale: float) -> BlockKernel:
    """For a `Prefill`: `attend`, whose result is written as records."""

    def write(q: Any, k: Any, v: Any, causal: bool, records: Any) -> None:
        bits = (one.view(f"i{one.dtype.itemsize}") for one in (q, k, v))  # not all have a bfloat16
        made, q, k, v = map(torch.from_dlpack, (records, *bits))
        unseen = made.shape[2] - q.shape[1]
        out, lse = attend(q.view(dtype), k.view(dtype), v.view(dtype), causal, scale)
        made[:, :, :unseen] = 0
        made[:, :, :unseen, 0] = -torch.inf
        made[:, :, unseen:, 0], made[:, :, unseen:, 1] = lse, 1
        made[:, :, unseen:, 2:] = out.transpose(1, 2)

    return write
