"""Ranks that could part do not: generate() goes on with the scores and the random numbers of rank 0."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.generation import GenerationMixin, LogitsProcessor

from treeattn.agreement import must_match
from treeattn.errors import ArgumentError
from treeattn.huggingface.tensors import digest

__all__ = ["AgreeingRanks", "follow_rank_0", "let_generate_agree"]

#: Ids of each sequence that are compared for a token, after all of them for the first.
_RECENT = 256


class AgreeingRanks(LogitsProcessor):
    """What every generate() over a `ShardedKV` of several ranks has behind its own processors.

    Attention gives all ranks the same bits. What is computed beside it does so too on equal processors; where
    they differ, a near tie could be decided otherwise on one rank, which would then write another text, or
    stop while the others wait for it. Costs a message of the scores (vocabulary x 4 bytes) a token, and one
    of a few bytes that compares the ids. Raises `ArgumentError`, on all ranks, where these differ.
    """

    def __init__(self, cache: Any) -> None:
        self._cache, self._first = cache, True

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """The scores of rank 0, whose random numbers come along."""
        ids = input_ids if self._first else input_ids[:, -_RECENT:]
        must_match(self._cache.comm, {"ids": digest(ids)})
        self._first = False
        return self._cache.agreed(scores)


def let_generate_agree(caches: type[Any]) -> None:
    """Have generate() of all models append `AgreeingRanks` where it is given one of `caches`, and refuse what
    would be another text. There is no place where transformers asks a cache; a version that made processors
    elsewhere would leave steps to `same_tokens`, which raises where ranks part."""
    prepare = GenerationMixin._get_logits_processor

    @functools.wraps(prepare)
    def prepared(model: Any, generation_config: Any, *given: Any, **named: Any) -> Any:
        processors = prepare(model, generation_config, *given, **named)
        cache = (named.get("model_kwargs") or {}).get("past_key_values")
        if not isinstance(cache, caches):
            return processors
        if generation_config.use_cache is False:
            raise ArgumentError("use_cache=False would cache every token anew: leave past_key_values out")
        if cache.comm.size > 1:
            if generation_config.max_time is not None:
                raise ArgumentError("max_time: ranks would stop at different tokens; pass max_new_tokens")
            processors.append(AgreeingRanks(cache))
        return processors

    GenerationMixin._get_logits_processor = prepared


def follow_rank_0(comm: Any, device: torch.device, given: Any = None) -> Any:
    """What rank 0 gave, and its random numbers for `device` from now on. Collective."""
    cuda = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index] if cuda else torch.default_generator
    given, state = comm.bcast((given, generator.get_state().numpy()))
    generator.set_state(torch.from_numpy(state))
    return given
