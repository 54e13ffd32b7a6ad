"""Decoders for the kinds of steps that models ask for, each planned once for a communicator."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from treeattn.attention.mask import Rules
from treeattn.attention.shard import CacheFormat
from treeattn.collectives.runtime.reducer import Owner
from treeattn.decoder import Decoder, Reduction
from treeattn.mpi import communicators

#: Queries of a plan at most: records are held for all of them.
MOST_QUERIES = 256

#: Numbers of queries beside one that a kind of step has plans for, those that came last: prompts have all
#: lengths, and a plan holds memory and a communicator.
MOST_LENGTHS = 8


class Scoring(NamedTuple):
    """How q and k become logits, as models say it. window: the last slots that are seen, 0 for all; softcap:
    0 for none."""

    scale: float
    window: int = 0
    softcap: float = 0.0

    def rules(self, causal: bool = True) -> Rules:
        """Which keys a query sees, and what becomes of its logits."""
        window = (self.window - 1, None) if self.window else None
        return Rules(causal=causal, window=window, softcap=self.softcap or None)


class Plans:
    """Attention over the ranks of `comm`, whose tokens lie interleaved. Results lie in its decoders: it is
    one thread's, and one cache's, at a time.

    A kind of step that is new is collective. Plans of one query stay; of several, those that were used last.
    """

    def __init__(self, comm: Any, reduction: Reduction, owner: Owner) -> None:
        self.comm, self._reduction, self._owner = comm, reduction, owner
        self._decoders: dict[Any, dict[int, Decoder]] = {}  # of a kind by queries, the last used last

    def attend(
        self,
        q: Any,
        k: Any,
        v: Any,
        stands: range,
        scoring: Scoring,
        lengths: Any = None,
        begins: Any = None,
    ) -> tuple[Any, Any]:
        """out [batch, queries, own heads, v_dim] and lse [batch, own heads, queries], which hold until the
        next call.

        q [batch, queries, heads, dim] at the slots `stands`, of which the last is the end of the sequence
        where there is one query; k, v: this rank's tokens, `lengths` [batch] of them, or all. Seen is what is
        not before `begins` [batch] and not after the query.
        """
        causal = len(stands) > 1
        if len(stands) <= MOST_QUERIES:
            return self._attend(q, k, v, stands, scoring, lengths, begins, causal)
        parts = []
        for first in range(0, len(stands), MOST_QUERIES):
            part = slice(first, first + MOST_QUERIES)
            both = self._attend(q[:, part], k, v, stands[part], scoring, lengths, begins, causal)
            parts.append([_kept(one) for one in both])
        outs, lses = zip(*parts, strict=True)
        return _joined(outs, 1), _joined(lses, 2)

    def _attend(
        self,
        q: Any,
        k: Any,
        v: Any,
        stands: range,
        scoring: Scoring,
        lengths: Any,
        begins: Any,
        causal: bool,
    ) -> tuple[Any, Any]:
        """Attention of no more queries than a plan may have."""
        if len(stands) == 1 and stands[0] < scoring.window:
            scoring = scoring._replace(window=0)
        causal = causal or scoring.window > 0
        decoder = self._decoder(q, k, v, scoring, causal)
        if not causal and begins is None and lengths is not None:
            end = int(lengths[0])  # as a slice it is one call of compiled code
            return decoder(q, k[:, :end], v[:, :end])
        seen: dict[str, Any] = {"q_positions": np.array(stands)} if causal else {}
        return decoder(q, k, v, lengths, begins=begins, **seen)

    def _decoder(self, q: Any, k: Any, v: Any, scoring: Scoring, causal: bool) -> Decoder:
        batch, queries, heads, head_dim = q.shape
        kind = (batch, heads, head_dim, k.shape[2], v.shape[3], q.dtype, causal, *scoring)
        planned = self._decoders.setdefault(kind, {})
        decoder = planned.get(queries) if queries == 1 else planned.pop(queries, None)
        if decoder is None:
            several = [length for length in planned if length > 1]
            if queries > 1 and len(several) == MOST_LENGTHS:
                planned.pop(several[0]).close()
            v_dim = None if v.shape[3] == head_dim else v.shape[3]
            decoder = Decoder(
                self.comm,
                heads=heads,
                kv_heads=k.shape[2],
                head_dim=head_dim,
                batch=batch,
                queries=queries,
                dtype=str(q.dtype).removeprefix("torch."),
                scheme=self._reduction,
                scale=scoring.scale,
                rules=scoring.rules(causal),
                device="cuda" if getattr(q, "is_cuda", False) else "cpu",
                cache=CacheFormat(positions="interleaved", v_dim=v_dim),
            )
            decoder.owner = self._owner
        planned[queries] = decoder
        return decoder


def _kept(array: Any) -> Any:
    """A copy: frameworks hold what they are given, a decoder writes it again."""
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def _joined(parts: Any, axis: int) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis)
    return torch.cat(parts, axis)


class Lent(NamedTuple):
    """The plans of one cache. number: among those over the communicator, alike on all ranks."""

    number: int
    owner: Owner
    plans: Plans
    by_heads: Plans


class _Pool:
    """The plans over a communicator that no cache has. One that is gone cannot close its own, since closing
    is collective: the next goes on with them."""

    def __init__(self) -> None:
        self.free: list[Lent] = []  # a list's pop and append are whole, whatever thread or collection calls
        self.numbers = itertools.count()

    def back(self, lent: Lent) -> None:
        lent.owner.let_go()
        self.free.append(lent)


def lend(cache: Any, comm: Any, reduction: Reduction, by_heads: Reduction) -> Lent:
    """Plans that no living cache has on any rank, else new ones, for as long as `cache` lives. Collective."""
    pool: _Pool = comm.kept.setdefault((reduction, by_heads), _Pool())
    free = {}
    with contextlib.suppress(IndexError):  # until there is none, whoever takes some meanwhile
        while True:
            one = pool.free.pop()
            free[one.number] = one
    try:
        common = set.intersection(*map(set, comm.allgather(list(free))))
        if common:
            lent = free.pop(min(common))
        else:
            owner = Owner("this cache")
            both = (Plans(comm, how, owner) for how in (reduction, by_heads))
            lent = Lent(next(pool.numbers), owner, *both)
    finally:
        pool.free.extend(free.values())
    weakref.finalize(cache, pool.back, lent).atexit = False
    return lent


class _Here(threading.local):
    plans: Plans | None = None


_here = _Here()


def alone() -> Plans:
    """Those of what a rank has whole, of this thread: nothing is sent. Where torch started the ranks, MPI is
    not asked."""
    started = dist.is_available() and dist.is_initialized()
    comm = _alone(dist.group.WORLD if started else None)
    if _here.plans is None or _here.plans.comm is not comm:
        _here.plans = Plans(comm, Reduction(), Owner("this thread's attention"))
    return _here.plans


@functools.lru_cache(maxsize=1)  # groups may be destroyed, and others made
def _alone(world: Any) -> Any:
    """A communicator of this rank, of which plans that end with their thread have no duplicates."""
    if world is None:
        return communicators.alone().lent()
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return communicators.intracomm(group)
