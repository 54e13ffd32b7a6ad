"""The cache that a model of transformers is given: full attention sharded, the rest as transformers has
it."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    get_layer_types_and_kwargs,
)

from treeattn.attention.shape import check_number
from treeattn.backends.device import find
from treeattn.cache import ShardedCache
from treeattn.cache_nodes import CacheNodes, connect
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.reducer import Owner
from treeattn.decoder import Reduction
from treeattn.errors import ArgumentError, StateError
from treeattn.huggingface import plans, saved
from treeattn.huggingface.agreeing_ranks import check_same_tokens, follow_rank_0
from treeattn.huggingface.fixed import FixedLayer
from treeattn.huggingface.layers import (
    HALF_FILLED,
    NOT_ATTENDED,
    FullAttentionLayer,
    RemoteLayer,
    SlidingWindowLayer,
    updated,
)
from treeattn.huggingface.mask import begins_of, late_begins
from treeattn.huggingface.origin import Origin
from treeattn.huggingface.plans import Plans
from treeattn.huggingface.tensors import refuse, torchs_stream
from treeattn.mpi import communicators
from treeattn.mpi.communicators import Agreement, collectively

_ATTENTION = {"full_attention": FullAttentionLayer, "sliding_attention": SlidingWindowLayer}
#: Layers by which a host is ahead of its GPU at most.
_AHEAD = 128
_STATES = ("linear_attention", "conv", "dummy")


class ShardedKV(Cache):
    """Keys and values of a model over the ranks of `comm`, for ``cache=``. Creating it is
    collective.

    All ranks call the model with the same tokens at the same time. A layer of full attention keeps each token
    on one rank (slot s on rank s mod ranks); layers of a sliding window and recurrent states, which are
    short, lie whole on every rank and are attended there, without a message. Slots are places in the sequence
    with its padding, as transformers counts them.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Of the model, loaded with ``attn_implementation="treeattn"``.
    comm : optional
        The ranks, as `treeattn.decode` takes them.
    capacity : int
        Slots of a sequence that there is room for at first, over all ranks; the cache grows.
    scheme : str, Schedule or Reduction, optional
        How partial results are merged, as `treeattn.decode` takes it; unless given "head_scatter" for a
        model whose weights are tensor parallel over the same ranks (``tp_plan="auto"``).

    nodes : bool or CacheNodes
        Whether keys and values lie on the other ranks of `comm`, which are cache nodes
        (`treeattn.cache_nodes`), by the tree of `scheme`. This process, rank 0, then runs the model alone.
        What `cache_nodes.connect` gave before the model was loaded does, too.
    fixed : bool
        Whether there never is more room than `capacity`, a multiple of the ranks, nor padding. Then
        ``torch.compile(model.forward, mode="reduce-overhead")`` makes one CUDA graph of a step of one token:
        steps without an attention_mask, of models with keys and values in layers of full attention alone,
        over peer memory, NCCL or one rank. Beyond its room torch asserts on the device there. What asks how
        many slots there are waits for the GPU once.

    Raises
    ------
    ArgumentError
        The same on every rank: another attention implementation, layers that are not served, arguments that
        differ between ranks.

    Examples
    --------
    >>> config = LlamaConfig(vocab_size=32, hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="treeattn")
    >>> cache = huggingface.ShardedKV(model.config, capacity=16)
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> model.generate(ids, cache=cache, max_new_tokens=2, min_new_tokens=2).shape
    torch.Size([1, 5])
    """

    def __init__(
        self,
        config: Any,
        comm: Any = None,
        *,
        capacity: int,
        scheme: Any = None,
        nodes: bool | CacheNodes = False,
        fixed: bool = False,
    ) -> None:
        self.fixed, self.behind = fixed, False  # whether steps were made that the host did not count
        self.failed = False  # whether one of them was not made whole
        self.nodes: CacheNodes | None = None
        self.scheme = scheme
        if nodes:
            connected = nodes if isinstance(nodes, CacheNodes) else None
            self.nodes = connected or connect(comm, scheme=scheme)
            comm, scheme = communicators.alone(), None
        self.comm, self.capacity = communicators.intracomm(comm), capacity
        # Made by one thread, it may be used by another.
        with self.comm.owner.during():
            self._plan(config, scheme)

    def _plan(self, config: Any, scheme: Any) -> None:
        with Agreement(self.comm, "ShardedKV") as agreed:
            text = config.get_text_config(decoder=True)
            if text._attn_implementation != "treeattn":
                raise ArgumentError(
                    f"the model attends by {text._attn_implementation!r}: load it with "
                    "attn_implementation='treeattn'"
                )
            _refuse_another_way(text)
            check_number("capacity", self.capacity)
            self.latent = bool(getattr(text, "kv_lora_rank", None))
            if self.fixed and (self.latent or self.nodes is not None):
                raise ArgumentError("fixed=True is not for latents, nor for cache nodes: leave it out")
            configs = text.per_layer_config
            layers = [
                self._layer(kind, config, given)
                for config, kind, given in zip(configs, *get_layer_types_and_kwargs(text), strict=True)
            ]
            reduction = Reduction.of(scheme)
            by_heads = reduction if scheme is not None else Reduction("head_scatter", output="heads")
            agreed.must_match = {
                "capacity": self.capacity,
                "fixed": self.fixed,
                "scheme": reduction,
                "the layers of the model": len(layers),
            }
        super().__init__(layers=layers)
        self.model_type, self.config, self.origin = text.model_type, text, Origin()
        self.full = [layer for layer in layers if isinstance(layer, FullAttentionLayer)]
        self.first = next((one for one in layers if isinstance(one, tuple(_ATTENTION.values()))), None)
        # Once: a schedule of the user's is hashed by all its messages.
        kept, both = self.comm.kept, (reduction, by_heads)
        self._plans = tuple(kept.setdefault(how, Plans(self.comm, how)) for how in both)
        self.plans_handle = self._plans[0].handle if self.comm.size > 1 else 0
        if self.fixed:
            self.capacity += -self.capacity % self.comm.size
        self.owner = Owner("this cache")
        self.device = torch.device("cpu")  # where its arrays lie
        self._waits = _Queued()
        self._watched = False  # within a call that ends what it begins
        self.generates = False  # whether generate() calls the model with it
        self.ids_agreed = False  # whether generate() prepared this step, and all ranks have its ids
        self.dealt: Any = None  # while a prefill is under way in which each rank has tokens of its own
        follow_rank_0(self.comm, torch.device("cpu"))
        _warn_of_too_many_threads(self.comm)

    def __repr__(self) -> str:
        held = sum(array.nbytes for layer in self.full for array in getattr(layer.shard, "arrays", ()))
        where = (
            f"rank {self.comm.rank} of {self.comm.size}, {self.get_seq_length()} slots, {held:,} bytes here"
        )
        return f"ShardedKV({self.model_type}, scheme={self.scheme!r}, {where})"

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Any:
        """The new keys and values of a layer, on their way to attention. Nothing is ever moved off a
        device. Raises `StateError` in a second thread."""
        if not torch.compiler.is_compiling():
            self.use()
        if layer_idx >= len(self.layers):
            raise ArgumentError(
                f"the model has more than the {len(self.layers)} layers of the cache: make it of its config"
            )
        self.origin.check()
        return self.layers[layer_idx].update(key_states, value_states)

    def plans(self, by_heads: bool = False) -> Plans:
        """How its layers are attended; by_heads: where each rank goes on with its heads alone."""
        return plans.alone() if self.comm.size == 1 else self._plans[by_heads]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Slots of a step and where they begin, for a mask, to which transformers does not hand the cache.
        Raises `StateError` in a second thread, before a layer changes."""
        if not torch.compiler.is_compiling():
            self.use()
        updated().masked = self
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def check_attended(self) -> None:
        """Raise `StateError` where a layer was given tokens and nothing attended to them."""
        if getattr(updated().layer, "cache", None) is self:
            raise StateError(NOT_ATTENDED)

    def check_step(
        self, layer: FullAttentionLayer, key: torch.Tensor, begins: Any, at: int, new: Any
    ) -> None:
        """Once for a step, of its first layer: raise `ArgumentError` unless rows begin where those of the
        cache do and all ranks were given the same, which `new` keys show where nobody compared ids; and
        `StateError` in a second thread. Collective."""
        if layer is not self.full[0]:
            return
        self.use()
        agreed, self.ids_agreed = self.ids_agreed, False  # for one step
        if new and self.comm.size > 1 and not agreed:
            check_same_tokens(self.comm, key, begins)
        self.check_padding(begins, at, len(key))

    def check_padding(self, begins: Any, at: int, rows: int) -> None:
        """Raise `ArgumentError` unless rows begin where those of the cache do."""
        self.check_fixed(at, begins)
        self.origin.check_padding(begins, at, rows)

    def check_fixed(self, slots: int, begins: Any = None) -> None:
        """Raise `ArgumentError` where fixed room is for fewer slots, or a row begins later than others."""
        if self.fixed and (slots > self.capacity or begins is not None):
            problem = f"{slots} slots in room for {self.capacity}" if begins is None else "rows with padding"
            raise ArgumentError(f"{problem} need a larger cache, or one without fixed=True")

    def prepare_fixed(self, given: dict[str, Any], ids: torch.Tensor | None) -> None:
        """Before generate() gives this to the model: a mask that grows would be another graph each time.
        Raises `ArgumentError` for padding, and where there is no room."""
        if not self.fixed or ids is None:
            return
        at = self.get_seq_length()
        self.check_fixed(at + ids.shape[1])
        if ids.shape[1] == 1:
            seen = given.pop("attention_mask", None)
            if seen is not None and not self.origin.compared:
                self.check_padding(late_begins(begins_of(seen, seen.shape[1])), at, len(ids))

    def catch_up(self) -> None:
        """Wait for the steps that a compiled model made, and take from the GPU how many slots there are.
        Raises `TransportError` where another rank did not come to them."""
        if not self.behind:
            return
        if torch.compiler.is_compiling():
            refuse("several tokens after steps of a compiled model: call cache.get_seq_length() first")
        if self.failed:
            raise StateError(HALF_FILLED)
        with torchs_stream(self.device):
            self.plans().synchronize()
            made = [layer for layer in self.full if isinstance(layer, FixedLayer) and layer.count is not None]
            counts = torch.stack([layer.count for layer in made]).cpu().tolist()
        for layer, slots in zip(made, counts, strict=True):
            layer.catch_up(slots)
        self.behind = False

    def use(self) -> None:
        """From here on it is this thread's, and over several ranks its communicator, too. Raises
        `StateError`, before anything is sent, where another thread has one of them and still runs."""
        self.owner.take()
        self.comm.owner.take()

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Use the cache for one whole call: afterwards another thread may have it."""
        with self.owner.during(), self.comm.owner.during():
            self._watched = True
            try:
                yield
            finally:
                self.generates = self._watched = self.ids_agreed = False
                self._waits.__exit__()

    def expect_others(self, device: torch.device, queries: int) -> None:
        """What was queued to a GPU waits for other ranks, and torch for it, where nothing gives up: watched
        from here on, in a call of `during`, until all have met again."""
        if self._watched and device.type == "cuda" and self.comm.size > 1:
            self._waits.layer(torch.cuda.current_stream(device) if queries > 1 else None)

    def _layer(self, kind: str, config: Any, given: dict[str, Any]) -> Any:
        if self.fixed and kind != "full_attention":
            raise ArgumentError(f"fixed=True is for layers of full attention, not of {kind!r}: leave it out")
        if self.fixed:
            return FixedLayer(self, config)
        if kind in _ATTENTION:
            return _ATTENTION[kind](self, config)
        if kind in _STATES:
            return DYNAMIC_LAYER_TYPE_MAPPING[kind](**given)
        raise ArgumentError(f"layers of {kind!r} are not served: {', '.join((*_ATTENTION, *_STATES))} are")

    def make_shards(self, layer: FullAttentionLayer, k: Any, v_dim: int, kind: tuple[Any, ...]) -> None:
        """Give `layer` and those of its width an empty cache for such keys; to it alone where others of them
        hold tokens already, of another kind. Collective."""
        alike = [one for one in self.full if one.width == layer.width]
        if any(one.held for one in alike):
            alike = [layer]
        batch, _, kv_heads, head_dim = k.shape
        how: dict[str, Any] = {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "v_dim": v_dim}
        how |= {"layers": len(alike), "capacity": self.capacity, "dtype": k.dtype, "latent": kind[2]}
        self.device, shards = k.device, list[Any]()
        if self.nodes is not None:
            remote = self.nodes.cache(**how)
            shards += [RemoteLayer(remote, number) for number in range(len(alike))]
        else:
            shards += ShardedCache(self.comm, device=k.device, **how).layers
        for one, shard in zip(alike, shards, strict=True):
            one.shard, one.kind, shard.owner = shard, kind, self.owner

    def agreed(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores of rank 0 on every rank, and from now on its random numbers, so that all go on alike:
        `generate()` asks by itself, a loop of one's own before it chooses a token. Collective."""
        mine = scores.detach().float().cpu().numpy()  # on all: each waits for its own GPU, not for rank 0's
        agreed = follow_rank_0(self.comm, scores.device, mine)
        self._waits.__exit__()
        return torch.from_numpy(agreed).to(scores)

    def save(self, directory: str | Path, *, unchecked: bool = False) -> None:
        """Write all tokens into a directory that all ranks share, as `ShardedCache.save`: a prompt that was
        computed once is continued by any job. Collective.

        unchecked: also tokens that were not given as ids to `prefill` or `generate()`; only an unchecked
        `load` takes them. Raises `ArgumentError` for such, for a model with windows or recurrent states, and
        as `ShardedCache.save`.
        """
        with torchs_stream(self.device):
            saved.save(self, directory, unchecked)

    def load(self, directory: str | Path, *, unchecked: bool = False, device: Any = "cpu") -> None:
        """What `save` wrote for this model, on any number of ranks or cache nodes; ``generate()`` of ids that
        begin with those tokens goes on from there. Collective.

        The configuration is compared here, ids, padding and weights by the first `generate()`, which raises
        `ArgumentError` for others; nothing else goes on before. unchecked: nothing of that is compared.
        device: where the model computes, as a word or as torch's object.
        Raises `ArgumentError` for another model, a cache that is not empty, and as `ShardedCache.load`.
        """
        collectively(self.comm, lambda: find(device))
        with torchs_stream(torch.device(device)):
            saved.load(self, directory, unchecked, torch.device(device))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, which would hold one rank's part alone."""
        raise ArgumentError(
            "a ShardedKV lies on many ranks and cannot be copied: crop(-tokens) goes back to where several "
            "texts begin the same, batch_repeat_interleave(n) goes on with n of them"
        )

    def reset(self) -> None:
        """Forget all tokens."""
        self.owner.check()
        updated().layer = None
        self.behind = self.failed = False
        self.origin = Origin()
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many of the last slots, given as a negative number."""
        self.owner.check()
        self.origin.check()
        super().crop(tokens_to_remove)
        self.origin.crop(self.get_seq_length())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on with what row beam_idx[i] was."""
        self.owner.check()
        with torchs_stream(self.device):
            super().reorder_cache(beam_idx)
        self.origin.select(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other."""
        held = (layer.rows() for layer in self.layers if hasattr(layer, "rows"))
        if rows := next(filter(None, held), 0):
            self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))


class _Queued(watchdog.Guarded):
    """What was queued to a GPU: the limit holds for each layer, since of a long prompt a GPU has enough to
    do."""

    def __init__(self) -> None:
        self._prompt = deque[tuple[int, Any]](maxlen=_AHEAD)
        super().__init__("a step of the model, queued to a GPU")

    def layer(self, stream: torch.cuda.Stream | None) -> None:
        """The next one; stream: to which a prompt is queued."""
        self.__enter__()
        if stream is not None:
            event: Any = torch.cuda.Event
            reached = event()
            reached.record(stream)
            self._prompt.append((self._number, reached))

    def __exit__(self, *exception: object) -> None:
        self._prompt.clear()  # nobody may ask a GPU for its events while a graph is captured
        super().__exit__(*exception)

    @property
    def blocking(self) -> int:
        """That of the first layer which the GPU has not reached, else of the last."""
        last = super().blocking
        return last and next((number for number, one in list(self._prompt) if not one.query()), last)


def _refuse_another_way(config: Any) -> None:
    """Raise `ArgumentError` for a model of transformers that attends by itself, whatever name it was given:
    its file does not know the interface. Models of others are recognised by keys that wait."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if hasattr(model, "_setup_cache"):  # and does not begin it anew with a cache that it is given
        raise ArgumentError(f"{model.__name__} keeps a state of its own beside the cache: it is not served")
    if model is None or model._supports_attention_backend:
        return
    if not hasattr(sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS"):
        raise ArgumentError(f"{model.__name__} does not go through transformers' attention interface")


def _warn_of_too_many_threads(comm: Any) -> None:
    """Warn in a line where the ranks of this machine are not bound to processors of their own and have more
    threads than there are; torchrun gives each rank one, mpiexec as many as there are processors."""
    here = next(len(group) for group in comm.nodes if comm.rank in group)
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) < cores
    if here > 1 and threads > 1 and not bound and here * threads > cores:
        warnings.warn(
            f"torch has {threads} threads on each of {here} ranks of this machine, which has {cores} "
            f"processors: set OMP_NUM_THREADS={max(1, cores // here)}",
            RuntimeWarning,
            stacklevel=3,
        )
