"""What the tokens of a cache were made of, so that no other text, and no other model, goes on with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from treeattn.errors import ArgumentError, StateError
from treeattn.huggingface.mask import begins_of
from treeattn.huggingface.tensors import digest
from treeattn.mpi.communicators import Agreement

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


class Origin:
    """What the tokens of a `ShardedKV` were made of: ids and weights, as `prefill` and `generate()` tell
    them, and where its rows begin. Of a cache that was loaded, what was `saved`, until the first `generate()`
    has shown the same.
    """

    def __init__(self) -> None:
        self.saved: dict[str, list[str]] | None = None
        self.begins: Any = None  # int64 [rows], as attention was told of padding; None before
        self.compared = False  # with the mask of the generate() under way, which goes on with ones
        self._weights: str | None = None
        self._ids: torch.Tensor | None = torch.empty(0, 0, dtype=torch.int64)  # None: there is more to it

    def begin(
        self, cache: ShardedKV, model: Any, ids: torch.Tensor | None, mask: Any = None, dealt: bool = False
    ) -> None:
        """Check before `model` goes on with `ids` [rows, tokens], which begin with those of the cache; None
        where they do not say it all. mask [rows, tokens]: with zeros for padding, where it is known already.
        dealt: each rank has keys of its own, in which nobody would see other weights. Collective.

        Raises `ArgumentError`, the same on every rank and before the cache changes, where ranks are given
        others, it holds tokens of other ids or another padding, or was saved by another model.
        """
        slots = cache.get_seq_length()
        before, weights = self.text(slots), weights_digest(model)
        with Agreement(cache.comm) as agreed:
            begins = None if mask is None else begins_of(mask, mask.shape[1]).numpy()
            text = None if ids is None else _masked(ids[:, :slots], self.begins if begins is None else begins)
            if self.saved is not None:
                _compare(self.saved, cache.comm, text, weights)
                before, self._weights = text, weights
            elif slots and text is not None and before is not None:
                _check_same_text(before, text)
            elif slots and begins is not None:
                self.check_padding(begins, slots, len(begins))
            agreed.must_match = {
                "ids": None if ids is None else digest(ids),
                "attention_mask": None if begins is None else begins.tolist(),
                "weights": weights if dealt else None,
            }
        self.saved = None
        self.begins = self.begins if begins is None else begins
        self._weights = weights if slots == 0 or weights == self._weights else None
        self._ids = None if ids is None or before is None else ids[:, :slots]
        self.compared = False

    def tell(self, ids: torch.Tensor, slots: int) -> None:
        """All ids so far, of which the cache has all."""
        if self._ids is not None and ids.shape[1] == slots:
            self._ids = ids

    def check_padding(self, begins: Any, at: int, rows: int, gone: int = 0) -> None:
        """Raise `ArgumentError` where a row that has begun before slot `at` would begin elsewhere now, or
        there are other rows. begins: int64 [rows], counted from slot `gone`, or None where all begin at
        once."""
        begins = np.zeros(rows, np.int64) if begins is None else begins
        if self.begins is not None and at:
            if len(begins) != len(self.begins):
                raise ArgumentError(f"the cache holds {len(self.begins)} texts, these are {rows}: reset() it")
            if (begins != np.maximum(self.begins - gone, 0))[self.begins < at].any():
                raise ArgumentError(
                    f"rows of the cache begin at slots {self.begins.tolist()}, those of this call at "
                    f"{(begins + gone).tolist()}: pass the attention_mask of the whole text"
                )
        if not gone:
            self.begins = begins
        elif self.begins is not None:
            self.begins = np.where(self.begins < gone, self.begins, begins + gone)
        self.compared = self.begins is not None

    def known_begins(self, at: int) -> torch.Tensor | None:
        """int64 [rows], where all have begun before slot `at` and an earlier step has told: a mask of what
        follows has nothing new, and on a GPU reading it waits."""
        known = self.compared and (self.begins < at).all()
        return torch.from_numpy(self.begins) if known else None

    def text(self, slots: int) -> torch.Tensor | None:
        """int64 [rows, slots] with -1 for padding, or None where it is not known."""
        if self._ids is None or self._ids.shape[1] < slots or self.saved is not None:
            return None
        return _masked(self._ids[:, :slots], self.begins)

    def described(self, cache: ShardedKV) -> dict[str, list[Any]]:
        """SHA-256 of each row of the text, where it begins, and SHA-256 of the weights of this rank. Raises
        `ArgumentError` where they are not known."""
        if self.saved is not None:
            return self.saved | {"begins": self.begins.tolist()}
        text = self.text(cache.get_seq_length())
        if text is None or self._weights is None:
            what = "ids" if text is None else "weights"
            raise ArgumentError(
                f"the {what} that the cache was made by are not known: give ids to prefill() or generate(), "
                "by one model; save(.., unchecked=True) goes without, as load then must"
            )
        return {"ids": _text_digests(text), "begins": self.begins.tolist(), "weights": [self._weights]}

    def hold(self, described: dict[str, Any]) -> None:
        """What a loaded cache says of itself."""
        self.saved = {name: list(map(str, described[name])) for name in ("ids", "weights")}
        self.begins = np.array(described["begins"], np.int64)

    def crop(self, slots: int) -> None:
        """Forget the slots from there on."""
        if self._ids is not None:
            self._ids = self._ids[:, :slots]

    def select(self, rows: torch.Tensor) -> None:
        """Row i is what row rows[i] was."""
        if self._ids is not None and len(self._ids):
            self._ids = self._ids[rows.to(self._ids.device)]
        if self.begins is not None:
            self.begins = self.begins[rows.cpu().numpy()]
        if self.saved is not None:
            self.saved["ids"] = [self.saved["ids"][row] for row in rows.tolist()]

    def check(self) -> None:
        """Raise `StateError` where what was loaded has not been compared yet."""
        if self.saved is not None:
            raise StateError(
                "the cache was loaded, and its text and weights were not compared yet: generate() does so "
                "first; load(.., unchecked=True) goes without"
            )


def _masked(ids: torch.Tensor, begins: Any) -> torch.Tensor:
    """The ids on the host, with -1 for padding."""
    ids = ids.cpu().long()
    if begins is None or len(begins) != len(ids):
        return ids
    return torch.where(torch.arange(ids.shape[1]) < torch.from_numpy(begins)[:, None], -1, ids)


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
    """SHA-256 of what this rank holds of the weights: of each its name, type, shape and up to 64 elements;
    and of the adapters that are active. None where some are not in memory, or cannot be read."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    model = getattr(model, "get_base_model", lambda: model)()  # of PEFT, whose generate() is that of this one
    digest, drawn = hashlib.sha256(), []
    for name, given in sorted(model.state_dict(keep_vars=True).items()):
        for held in _held(given):
            if isinstance(held, torch.Tensor) and not held.is_meta and not held.is_quantized:
                digest.update(f"{name} {held.dtype} {list(held.shape)};".encode())
                elements = held.detach().reshape(-1).view(torch.uint8).view(-1, held.element_size())
                # An odd stride: not down one column.
                drawn.append(elements[:: -(-len(elements) // _ELEMENTS) | 1].flatten())
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
