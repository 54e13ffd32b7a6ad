"""Ranks that could part do not: they go on with the scores and the random numbers of rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import LogitsProcessor

from treeattn.agreement import must_match
from treeattn.huggingface.tensors import digest

if TYPE_CHECKING:
    from treeattn.huggingface.cache import ShardedKV

__all__ = ["AgreeingRanks", "share_random_numbers"]


class AgreeingRanks(LogitsProcessor):
    """``generate(.., logits_processor=[AgreeingRanks(cache)])``: the scores of rank 0 count on all ranks.

    Attention gives all ranks the same bits. What is computed beside it does so too on equal processors; where
    they differ, a near tie could be decided otherwise on one rank, which would then write another text, or
    stop while the others wait for it. Costs one message of the scores (vocabulary x 4 bytes) a token.
    The first call raises `ArgumentError`, on all ranks, where they were given different prompts.
    """

    def __init__(self, cache: ShardedKV) -> None:
        self._comm, self._checked = cache.comm, False

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """The scores of rank 0, whose random numbers come along."""
        if not self._checked:
            must_match(self._comm, {"ids": digest(input_ids)})
            self._checked = True
        share_random_numbers(self._comm)
        array = scores.detach().cpu().contiguous().numpy()
        return torch.from_numpy(self._comm.bcast(array)).to(scores.device)


def share_random_numbers(comm: Any) -> None:
    """Draw the same on every rank from now on. Collective."""
    torch.set_rng_state(torch.from_numpy(comm.bcast(torch.get_rng_state().numpy())))
