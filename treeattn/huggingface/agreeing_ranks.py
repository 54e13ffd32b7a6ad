"""All ranks of a generate() stay together: it goes on with the scores, random numbers and draws of rank 0,
and ranks that were given different tokens raise an error before they mix them."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import torch
from transformers.generation import GenerationMixin, LogitsProcessor, StoppingCriteria, StoppingCriteriaList

from treeattn.errors import ArgumentError
from treeattn.huggingface.origin import Telling
from treeattn.huggingface.tensors import digest
from treeattn.mpi.agreement import Agreement, must_match

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
        self.compare(input_ids if self._first else input_ids[:, -_RECENT:])
        self._first = False
        return self._cache.agreed(scores)

    def compare(self, ids: Any) -> None:
        """Raise `ArgumentError` unless all ranks have these. Collective."""
        must_match(self._cache.comm, {"ids": digest(ids)})

    def drawn(self, tokens: Any) -> Any:
        """Those of rank 0. Collective."""
        return torch.from_numpy(self._cache.comm.bcast(tokens.cpu().numpy()))


class AgreeingDraws(StoppingCriteria):
    """Puts the tokens that rank 0 drew behind the ids, before any criterion looks at them: probabilities are
    made of the same scores on each rank, and may differ in a last bit."""

    def __init__(self, ranks: AgreeingRanks) -> None:
        self._ranks = ranks

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Replace the last token by rank 0's; no sequence ends here."""
        input_ids[:, -1] = self._ranks.drawn(input_ids[:, -1])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def let_generate_agree(caches: type[Any]) -> None:
    """Have generate() of all models append `AgreeingRanks` where it is given one of `caches`, and refuse what
    would be another text. There is no place where transformers asks a cache; a version that made processors
    elsewhere would leave steps to `check_same_tokens`, which raises where ranks part."""
    prepare = GenerationMixin._get_logits_processor

    @functools.wraps(prepare)
    def prepared(model: Any, generation_config: Any, *given: Any, **named: Any) -> Any:
        processors = prepare(model, generation_config, *given, **named)
        of_the_model = (named.get("model_kwargs") or {}).values()
        cache = next((value for value in of_the_model if isinstance(value, caches)), None)
        if cache is None:
            return processors
        cache.owner.check()
        cache.comm.owner.check()
        if generation_config.use_cache is False:
            raise ArgumentError("use_cache=False would cache every token anew: leave the cache out")
        tokens, slots = named.get("input_ids_seq_length") or 0, cache.get_seq_length()
        if 0 < tokens <= slots:
            raise ArgumentError(
                f"the cache has {slots} slots already and the text {tokens} tokens: pass one that begins "
                "with those of the cache and goes on, or reset() it"
            )
        processors.append(Telling(cache))
        if cache.comm.size > 1:
            if generation_config.max_time is not None:
                raise ArgumentError("max_time: ranks would stop at different tokens; pass max_new_tokens")
            processors.append(AgreeingRanks(cache))
        return processors

    GenerationMixin._get_logits_processor = prepared
    for name in ("_sample", "_beam_search", "_assisted_decoding"):
        setattr(GenerationMixin, name, _agreeing(getattr(GenerationMixin, name), caches))


def _agreeing(decode: Any, caches: type[Any]) -> Any:
    """A decoding method that has its cache for itself, goes on with none of another text, and whose ranks go
    on with what rank 0 drew. Beams and drafts have no place for that: ranks that drew otherwise raise at the
    next token, or at the end."""

    @functools.wraps(decode)
    def decoded(
        model: Any,
        ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **more: Any,
    ) -> Any:
        with contextlib.ExitStack() as held:
            for cache in (given for given in more.values() if isinstance(given, caches)):
                held.enter_context(cache.during())
                mask, others = more.get("attention_mask"), {**more, "attention_mask": None}
                whole = not any(torch.is_tensor(one) and one.is_floating_point() for one in others.values())
                cache.origin.begin(cache, model, ids, mask, whole)
            agreeing = [one for one in logits_processor if isinstance(one, AgreeingRanks)]
            draws = agreeing if generation_config.do_sample else []
            if decode.__name__ == "_sample":
                stopping_criteria = StoppingCriteriaList([*map(AgreeingDraws, draws), *stopping_criteria])
                draws = []
            found = decode(model, ids, logits_processor, stopping_criteria, generation_config, **more)
            for ranks in draws:
                ranks.compare(found if isinstance(found, torch.Tensor) else found.sequences)
            return found

    return decoded


def follow_rank_0(comm: Any, device: torch.device, given: Any = None) -> Any:
    """What rank 0 gave, and its random numbers for `device` from now on. Collective."""
    cuda = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index] if cuda else torch.default_generator
    given, state = comm.bcast((given, generator.get_state().numpy()))
    generator.set_state(torch.from_numpy(state))
    return given


#: Values of the keys that are compared, evenly spaced.
_VALUES = 512


def check_same_tokens(comm: Any, key: torch.Tensor, begins: Any) -> None:
    """Raise `ArgumentError` on every rank unless all have the same new keys and padding. Collective.

    key [batch, kv_heads, tokens, dim], begins [batch] or None. Keys are equal within the square root of the
    precision of their type, since unequal processors round otherwise. Compared are a few of them: prompts of
    many tokens that differ in a few alone may pass.
    """
    rows = key.detach().transpose(1, 2)
    places = np.linspace(0, rows.numel() - 1, min(_VALUES, rows.numel())).astype(int)
    chosen = tuple(torch.from_numpy(place).to(rows.device) for place in np.unravel_index(places, rows.shape))
    with Agreement(comm) as agreed:
        values = rows[chosen].double().cpu().numpy()
        agreed.share = tuple(rows.shape), None if begins is None else begins.tolist(), values
    (*alike, first), near = agreed.gathered[0], torch.finfo(key.dtype).eps ** 0.5
    floor = near * float(np.median(np.abs(first)))
    for rank, (*others, values) in enumerate(agreed.gathered):
        if others != alike or not np.allclose(values, first, rtol=near, atol=floor, equal_nan=True):
            raise ArgumentError(
                f"ranks were given different tokens: those of rank {rank} are not those of rank 0; every "
                "rank must pass the same prompt and padding, and go on with cache.agreed(scores)"
            )
