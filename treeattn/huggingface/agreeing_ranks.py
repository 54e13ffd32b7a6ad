"""All ranks of a generate() stay together: it goes on with the scores and random numbers of rank 0, and ranks
that were given different tokens raise an error before they mix them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import torch
from transformers.generation import GenerationMixin, LogitsProcessorList

from treeattn.errors import ArgumentError
from treeattn.huggingface.tensors import digest
from treeattn.mpi.communicators import Agreement


def let_generate_agree(caches: type[Any]) -> None:
    """Have generate() of all models, where it is given one of `caches`, which it then has for itself, refuse
    what would be another text, see that each step has the same ids on all ranks, and choose by the scores of
    rank 0. There is no place where transformers asks a cache.

    Attention gives all ranks the same bits. What is computed beside it does so too on equal processors; where
    they differ, a near tie could be decided otherwise on one rank, which would then write another text, or
    stop while the others wait for it. Costs a message of the scores (vocabulary x 4 bytes) a token.
    """
    generate, prepare = GenerationMixin.generate, GenerationMixin.prepare_inputs_for_generation
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def agreeing(model: Any, *given: Any, **named: Any) -> Any:
        name = next((name for name, value in named.items() if isinstance(value, caches)), None)
        if name is None:
            return generate(model, *given, **named)
        cache = named["cache"] = named.pop(name)  # with its name of before transformers would warn
        bound = signature.bind(model, *given, **named)

        def of_rank_0(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            cache.check_attended()
            cache.origin.tell(ids, cache.get_seq_length())
            agreed: torch.Tensor = scores if cache.comm.size == 1 else cache.agreed(scores)
            return agreed

        with cache.during():
            with Agreement(cache.comm, "generate()"):
                text = _text(cache, model, bound.arguments)
            cache.origin.begin(cache, model, *text)
            others = bound.arguments.get("logits_processor") or ()
            bound.arguments["logits_processor"] = LogitsProcessorList([*others, of_rank_0])
            cache.generates = True
            found = generate(*bound.args, **bound.kwargs)
            _agree(cache.comm, "the end of generate()", getattr(found, "sequences", found))
        return found

    @functools.wraps(prepare)
    def prepared(*given: Any, **named: Any) -> Any:
        found = prepare(*given, **named)
        cache = found.get("cache")
        if getattr(cache, "generates", False):
            ids = found.get("input_ids")
            _agree(cache.comm, "a step of generate()", ids)
            # Keys of the first step are compared all the same: weights, masks and positions may differ, too.
            cache.ids_agreed = ids is not None and cache.origin.compared
            cache.prepare_fixed(found, ids)
        return found

    GenerationMixin.generate, GenerationMixin.prepare_inputs_for_generation = agreeing, prepared


def _agree(comm: Any, call: str, ids: torch.Tensor | None) -> None:
    if comm.size > 1:
        with Agreement(comm, call) as agreed:
            agreed.must_match = {"ids": None if ids is None else digest(ids)}


def _text(cache: Any, model: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """The ids that generate() is `given`, a row for each that it makes of them, or None where they are not
    all there is to the text; and their mask, None where generate() makes it itself. Raises `ArgumentError`
    for what would be another text than without the cache."""
    more = given["kwargs"]
    configs = given.get("generation_config"), model.generation_config

    def asked(name: str) -> Any:  # as generate() asks: what one leaves open, the next says
        found = (more.get(name), *(getattr(config, name, None) for config in configs))
        return next((one for one in found if one is not None), None)

    if asked("use_cache") is False:
        raise ArgumentError("use_cache=False would cache every token anew: leave the cache out")
    if asked("max_time") is not None and cache.comm.size > 1:
        raise ArgumentError("max_time: ranks would stop at different tokens; pass max_new_tokens")
    ids, slots = given.get("inputs", more.get("input_ids")), cache.get_seq_length()
    if ids is None:
        return None, None
    if ids.shape[1] <= slots:
        raise ArgumentError(
            f"the cache has {slots} slots already and the text {ids.shape[1]} tokens: pass one that begins "
            "with those of the cache and goes on, or reset() it"
        )
    if any(torch.is_tensor(one) and one.is_floating_point() for one in more.values()):
        return None, None
    rows = max(asked("num_beams") or 1, asked("num_return_sequences") or 1)
    mask = more.get("attention_mask")
    if not torch.is_tensor(mask) or mask.shape != ids.shape:
        mask = None
    return ids.repeat_interleave(rows, 0), None if mask is None else mask.repeat_interleave(rows, 0)


def follow_rank_0(comm: Any, device: torch.device, given: Any = None) -> Any:
    """What rank 0 gave, and its random numbers for `device` from now on. Collective."""
    cuda = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index] if cuda else torch.default_generator
    given, state = comm.bcast((given, generator.get_state().numpy()))
    generator.set_state(torch.from_numpy(state))
    return given


#: Tokens whose keys are compared, evenly spaced, and channels of their first head.
_TOKENS, _CHANNELS = 64, 8


def check_same_tokens(comm: Any, key: torch.Tensor, begins: Any) -> None:
    """Raise `ArgumentError` on every rank unless all have the same new keys and padding. Collective.

    key [batch, kv_heads, tokens, dim], begins [batch] or None. Keys are equal within the square root of the
    precision of their type, since unequal processors round otherwise. Compared are a few tokens: long prompts
    that differ in others alone may pass.
    """
    some = key.detach()[:, 0, :: -(-key.shape[2] // _TOKENS), :_CHANNELS]
    with Agreement(comm, "a step of the model") as agreed:
        begin = None if begins is None else begins.tolist()
        agreed.share = tuple(key.shape), begin, some.double().cpu().numpy()
    (*alike, first), near = agreed.gathered[0], torch.finfo(key.dtype).eps ** 0.5
    floor = near * float(np.median(np.abs(first)))
    for rank, (*others, values) in enumerate(agreed.gathered):
        if others != alike or not np.allclose(values, first, rtol=near, atol=floor, equal_nan=True):
            raise ArgumentError(
                f"ranks were given different tokens: those of rank {rank} are not those of rank 0; every "
                "rank must pass the same prompt and padding, and go on with cache.agreed(scores)"
            )
