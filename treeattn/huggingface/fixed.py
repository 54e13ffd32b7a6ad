"""Layers of a cache of fixed room, whose steps of one token a CUDA graph holds: no number of Python is in
them, nothing waits for the host, and operations of torch append."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch

from treeattn.huggingface import plans
from treeattn.huggingface.layers import HALF_FILLED, FullAttentionLayer, carrying, updated
from treeattn.huggingface.plans import Scoring
from treeattn.huggingface.tensors import as_rows, as_tensor, finished, of_handle, refuse, torchs_stream


def _caught_up(name: str) -> Any:
    """An attribute that steps of a compiled model leave behind."""

    def read(layer: FixedLayer) -> Any:
        layer.cache.catch_up()
        return getattr(layer, name)

    return property(read, lambda layer, value: setattr(layer, name, value))


class FixedLayer(FullAttentionLayer):
    """Full attention in tensors that stay where they are: `k`, `v` [batch, own slots, kv_heads, dim] of this
    rank, and `count`, slots of the whole sequence, int64 []. Steps of one token of a compiled model know
    these alone; other steps are those of every layer, and set `count`."""

    k = v = count = bound = cast("Any", None)
    slots, shard = _caught_up("_slots"), _caught_up("_shard")

    @property
    def held(self) -> int:
        self.cache.catch_up()
        return self._held

    @held.setter
    def held(self, slots: int) -> None:
        self._held: int = slots
        if self._shard is not None:
            self._bind(self._shard)
            self.count.fill_(slots)

    def _bind(self, shard: Any) -> None:
        """The arrays of the shard as tensors, unless they are those already."""
        if self.bound is shard.k:
            return
        self.bound, kind = shard.k, getattr(torch, shard.format.dtype)
        with torch.inference_mode(False):
            bits = (one.view(f"i{one.dtype.itemsize}") for one in (shard.k, shard.v))
            self.k, self.v = (as_tensor(one).view(kind) for one in bits)
            self.count = torch.zeros((), dtype=torch.int64, device=self.cache.device)
        _of_keys[self.k.data_ptr()] = self
        for one in self.k, self.v, self.count:
            torch._dynamo.mark_static_address(one)

    def steps(self, states: torch.Tensor) -> bool:
        """Whether these, [batch, heads, tokens, dim], are of a step that is traced to be recorded."""
        traced = torch.compiler.is_compiling() and self.count is not None
        if traced and self.cache.failed:
            refuse(HALF_FILLED)
        return traced and states.shape[2] == 1 and len(states) == len(self.k)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """As that of every layer; a recorded step appends here. Raises `ArgumentError` where there is no room
        left, of which in a recorded step torch's own check of an index tells."""
        if self.steps(key_states):
            self.cache.check_attended()
            self._append(key_states, value_states)
            self.cache.behind = True
            updated().layer = self
            return carrying(self, key_states), value_states
        dealt = self.cache.dealt
        self.cache.check_fixed(self.slots + (key_states.shape[2] if dealt is None else dealt.tokens))
        return super().update(key_states, value_states)

    def _append(self, *new: torch.Tensor) -> None:
        """Slot s lies on rank s mod ranks, there s // ranks; the others write what they hold once more."""
        rank, size = self.cache.comm.rank, self.cache.comm.size
        index, mine = (self.count // size).view(1), self.count % size == rank
        for held, states in zip((self.k, self.v), new, strict=True):
            rows = states.detach().transpose(1, 2)
            held.index_copy_(1, index, torch.where(mine, rows, held.index_select(1, index)))
        self.count.add_(1)

    def step(self, query: torch.Tensor, scoring: Scoring, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attention of a recorded step, whose key and value are appended. Raises `ArgumentError` for what the
        host would have to look at."""
        if scoring.window or scoring.softcap or self.is_part(query.shape[1]):
            refuse("fixed=True is not for windows, softcap or tensor parallel weights: leave it out")
        rank, size = self.cache.comm.rank, self.cache.comm.size
        lengths = ((self.count + (size - 1 - rank)) // size).repeat(len(query))
        given = query, self.k, self.v, lengths, sinks, self.cache.plans_handle, scoring.scale
        made: torch.Tensor = torch.ops.treeattn.step(*given)
        return made

    def catch_up(self, slots: int) -> None:
        """So many have been appended in all."""
        self._shard.written(slots - self._held)
        self._slots = self._held = slots

    def get_seq_length(self) -> Any:
        """Slots of the whole sequence; of a traced model as the tensor that counts them."""
        return self.count if torch.compiler.is_compiling() and self.count is not None else self.slots

    def get_max_length(self) -> int:
        """Slots that there is room for."""
        return self.cache.capacity

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on with what row beam_idx[i] was; other numbers of rows lie elsewhere."""
        super().reorder_cache(beam_idx)
        self.held = self.held


#: Layers by where their keys lie, which is all that the operator knows of them.
_of_keys: weakref.WeakValueDictionary[int, FixedLayer] = weakref.WeakValueDictionary()


def _step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    sinks: torch.Tensor | None,
    own: int,
    scale: float,
) -> torch.Tensor:
    """out [batch, 1, heads, dim] of a query [batch, heads, 1, dim] to the first `lengths` int64 [batch] of
    this rank's key and value [batch, slots, kv_heads, dim], and to those of the other ranks of the plans
    whose handle is `own`, 0 where there are none. Collective.

    A CUDA graph holds what it queues: the first call plans, and one under capture finds it planned."""
    with torchs_stream(query.device):
        try:
            out, lse = (of_handle(own) or plans.alone()).step(as_rows(query), key, value, lengths, scale)
        except BaseException:
            if (layer := _of_keys.get(key.data_ptr())) is not None:  # some layers have the token, others not
                layer.cache.behind = layer.cache.failed = True
            raise
        return finished(out, lse, sinks, query.dtype)


_operator = torch.library.custom_op("treeattn::step", _step, mutates_args=())


@_operator.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, heads, queries, _dim = query.shape
    return query.new_empty((batch, queries, heads, value.shape[3]))
