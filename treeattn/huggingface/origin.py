"""What the tokens of a cache were made of, so that no other text, and no other model, goes on with them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.generation import LogitsProcessor

from treeattn.errors import ArgumentError, StateError
from treeattn.mpi.agreement import Agreement

if TYPE_CHECKING:
    from treeattn.huggingface.cache import ShardedKV

#: Elements of a parameter that are compared, evenly spaced.
_ELEMENTS = 64

#: What adapters (PEFT's, and those that call it so) say beside their weights.
_ADAPTED = "active_adapters", "disable_adapters", "merged_adapters", "scaling"

#: What a configuration says that no key depends on; the type of weights is compared with them.
_BESIDE = (
    "_", "architectures", "attn_implementation", "bos_", "dtype", "eos_", "experts_implementation", "output_",
    "pad_", "return_dict", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip

#: As whole numbers, whose bits are read: not every type of weights can be indexed.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Origin:
    """What the tokens of a `ShardedKV` were made of: ids and weights, as `prefill` and `generate()` tell
    them; others are not known. Of a cache that was loaded, what was `saved`, until the first `generate()` has
    shown the same.
    """

    def __init__(self) -> None:
        self.saved: dict[str, list[str]] | None = None
        self._weights: str | None = None
        self._told = False  # whether all that comes is
        self._ids, self._begins = torch.empty(0, 0), torch.zeros(0)
        self._rows = torch.zeros(0, dtype=torch.int64)  # of the ids: which ones the rows of the cache are

    def begin(self, cache: ShardedKV, model: Any, ids: torch.Tensor, mask: Any, whole: bool = True) -> None:
        """Check before `model` goes on with `ids`, whose first are those of the cache; `whole` unless there
        is more to the text than they say. Collective.

        ids, mask [batch, tokens]. Raises `ArgumentError`, the same on every rank, where the cache holds
        tokens of other ids, or was saved by another model.
        """
        slots, before = cache.get_seq_length(), self.text(cache.get_seq_length())
        whole = whole and (mask is None or mask.shape == ids.shape) and ids.shape[1] >= slots
        weights = weights_digest(model)
        begins = torch.zeros(len(ids)) if mask is None or not whole else (mask == 0).sum(1).cpu()
        text = _masked(ids[:, :slots], begins) if whole else None
        with Agreement(cache.comm):
            if self.saved is not None:
                _compare(self.described(cache), cache.comm, text, weights)
                before, self._weights = text, weights
            elif slots and text is not None and before is not None:
                _check_same_text(before, text)
        self.saved = None
        if slots and weights != self._weights:
            weights = None
        self._weights = weights
        self._told = whole and before is not None
        self._begins = begins
        self._hold(ids[:, :slots])

    def tell(self, ids: torch.Tensor, slots: int) -> None:
        """All ids so far, of which the cache has all."""
        if self._told and ids.shape[1] == slots:
            self._hold(ids)

    def _hold(self, ids: torch.Tensor) -> None:
        self._ids, self._rows = ids, torch.arange(len(ids))

    def text(self, slots: int) -> torch.Tensor | None:
        """int64 [batch, slots] with -1 for padding, or None where it is not known."""
        if self._ids.shape[1] < slots or self.saved is not None:
            return None
        return _masked(self._ids[:, :slots], self._begins)[self._rows]

    def described(self, cache: ShardedKV) -> dict[str, list[str]]:
        """SHA-256 of each row of the text, and of the weights of each rank, or of all where they are equal.
        Raises `ArgumentError` where they are not known."""
        if self.saved is not None:
            return self.saved | {"ids": [self.saved["ids"][row] for row in self._rows.tolist()]}
        text = self.text(cache.get_seq_length())
        if text is None or self._weights is None:
            what = "ids" if text is None else "weights"
            raise ArgumentError(
                f"the {what} that the cache was made by are not known: give ids to prefill() or generate(), "
                "by one model; save(.., unchecked=True) goes without, as load then must"
            )
        return {"ids": _text_digests(text), "weights": [self._weights]}

    def hold(self, described: dict[str, Any]) -> None:
        """What a loaded cache says of itself."""
        self.saved = {name: list(map(str, described[name])) for name in ("ids", "weights")}
        self._rows = torch.arange(len(self.saved["ids"]))

    def crop(self, slots: int) -> None:
        """Forget the slots from there on."""
        self.check()
        self._ids = self._ids[:, :slots]

    def select(self, rows: torch.Tensor) -> None:
        """Row i is what row rows[i] was."""
        if len(self._rows):
            self._rows = self._rows[rows.cpu()]

    def repeat(self, repeats: int) -> None:
        """Each row so often, one after the other."""
        self._rows = self._rows.repeat_interleave(repeats)

    def check(self) -> None:
        """Raise `StateError` where what was loaded has not been compared yet."""
        if self.saved is not None:
            raise StateError(
                "the cache was loaded, and its text and weights were not compared yet: generate() does so "
                "first; load(.., unchecked=True) goes without"
            )


class Telling(LogitsProcessor):
    """Tells the cache of a generate() the ids that it holds, and leaves the scores as they are."""

    def __init__(self, cache: ShardedKV) -> None:
        self._cache = cache

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Note the ids; the scores are returned as they are."""
        self._cache.origin.tell(input_ids, self._cache.get_seq_length())
        return scores


def _masked(ids: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    places = torch.arange(ids.shape[1])
    return torch.where(places < begins[:, None], -1, ids.cpu().long())


def _check_same_text(before: torch.Tensor, text: torch.Tensor) -> None:
    if before.shape != text.shape:
        raise ArgumentError(f"the cache holds {len(before)} texts, these are {len(text)}: reset() it")
    if not torch.equal(before, text):
        row, slot = (before != text).nonzero()[0].tolist()
        raise ArgumentError(
            f"the cache holds another text, from slot {slot} of row {row} on: pass ids and padding that "
            "begin with those of the cache, or crop() or reset() it"
        )


def _compare(saved: dict[str, Any], comm: Any, text: torch.Tensor | None, weights: str | None) -> None:
    """Raise `ArgumentError` unless what was loaded is of this text and these weights."""
    if text is None or weights is None:
        what = "ids of the text (inputs_embeds, or not from its beginning on)" if text is None else "weights"
        raise ArgumentError(
            f"the cache was loaded, and the {what} cannot be compared: load(.., unchecked=True) goes without"
        )
    if _text_digests(text) != saved["ids"]:
        raise ArgumentError(
            "the cache was saved of another text: pass ids and padding that begin with those it was made of"
        )
    theirs = saved["weights"]
    if len(theirs) not in (1, comm.size) or theirs[comm.rank % len(theirs)] != weights:
        raise ArgumentError(
            "the cache was saved by other weights, adapters or types, or by weights that were split over "
            "ranks in another way"
        )


def _text_digests(text: torch.Tensor) -> list[str]:
    """The SHA-256 of each row."""
    return [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in text]


def config_digest(config: Any) -> str:
    """SHA-256 of what a configuration says that keys may depend on: numbers, and names of functions."""
    kept = {name: one for name, one in config.to_dict().items() if not name.startswith(_BESIDE)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(model: Any) -> str | None:
    """SHA-256 of what this rank holds of the weights: of each its name, type, shape and 64 elements, evenly
    spaced; and of the adapters that are active. None where some are not in memory, or cannot be read."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    model = getattr(model, "get_base_model", lambda: model)()  # of PEFT, whose generate() is that of this one
    digest, drawn = hashlib.sha256(), []
    for name, given in sorted(model.state_dict(keep_vars=True).items()):
        for held in _held(given):
            if isinstance(held, torch.Tensor) and not held.is_meta:
                digest.update(f"{name} {held.dtype} {list(held.shape)};".encode())
                drawn.append(_elements(held.detach()))
            elif isinstance(held, str | bytes | int | float | torch.dtype | None):
                digest.update(f"{name} {held!r};".encode())
            else:
                return None
    for name, module in model.named_modules():
        for kind in _ADAPTED:
            said = getattr(module, kind, None)
            if said is not None and not callable(said):
                digest.update(f"{name}.{kind} {said!r};".encode())
    for device in dict.fromkeys(one.device for one in drawn):
        ours = [one for one in drawn if one.device == device]
        digest.update(torch.cat(ours).cpu().numpy().tobytes())  # one copy
    return digest.hexdigest()


def _held(given: Any) -> Iterator[Any]:
    """The plain tensors in it: this rank's part of a distributed one, the parts of a quantized one."""
    if isinstance(given, list | tuple):
        for one in given:
            yield from _held(one)
    elif is_traceable_wrapper_subclass(given):
        parts = (getattr(given, name) for name in given.__tensor_flatten__()[0])
        yield from _held([part for part in parts if isinstance(part, torch.Tensor)])
    else:
        yield given


def _elements(held: torch.Tensor) -> torch.Tensor:
    """uint8: the bytes of some of its elements."""
    if held.is_quantized:
        return held.reshape(-1)[_places(held.numel(), "cpu")].dequantize().view(torch.uint8)
    words = torch.view_as_real(held) if held.is_complex() else held
    words = words.view(_WORDS[words.element_size()]).reshape(-1)
    return words[_places(len(words), str(words.device))].view(torch.uint8)


@functools.lru_cache(maxsize=64)  # models have few shapes
def _places(elements: int, device: str) -> torch.Tensor:
    return torch.linspace(0, elements - 1, min(_ELEMENTS, elements), dtype=torch.float64).long().to(device)
