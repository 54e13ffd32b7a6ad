"""Decoders for the kinds of steps that models ask for, each planned once for a communicator."""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from treeattn.attention.arguments import CacheFormat, Rules
from treeattn.backends.cuda.runtime import default_runtime
from treeattn.collectives.runtime.reducer import Owner
from treeattn.decoder import Decoder, Reduction
from treeattn.errors import StateError, TransportError
from treeattn.huggingface.tensors import as_tensor, handle_of
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


#: A decoder, and its out and lse as tensors.
_Planned: TypeAlias = tuple[Decoder, tuple[torch.Tensor, ...]]


class Plans:
    """Attention over the ranks of `comm`, whose tokens lie interleaved, for all caches over them. Results lie
    in its decoders until the next call: it is one thread's at a time.

    A kind of step that is new is collective. Plans of one query stay; of several, those that were used last.
    """

    def __init__(self, comm: Any, reduction: Reduction) -> None:
        self.comm, self._reduction = comm, reduction
        self._owner = comm.owner if comm.size > 1 else Owner("this thread's attention")
        self._decoders: dict[Any, dict[int, _Planned]] = {}  # of a kind by queries, the last used last
        self.handle = handle_of(self)

    def attend(
        self,
        q: torch.Tensor,
        k: Any,
        v: Any,
        stands: range,
        scoring: Scoring,
        lengths: Any = None,
        begins: Any = None,
    ) -> tuple[torch.Tensor, ...]:
        """out [batch, queries, own heads, v_dim] and lse [batch, own heads, queries], which hold until the
        next call.

        q [batch, queries, heads, dim] at the slots `stands`, of which the last is the end of the sequence
        where there is one query; k, v: this rank's tokens, `lengths` [batch] of them, or all. Seen is what is
        not before `begins` [batch] and not after the query.
        """
        if len(stands) == 1 and stands[0] < scoring.window:
            scoring = scoring._replace(window=0)
        causal, parts = len(stands) > 1 or scoring.window > 0, []
        for first in range(0, len(stands), MOST_QUERIES):
            part = slice(first, first + MOST_QUERIES)
            decoder, results = self._decoder(q[:, part], k, v, scoring, causal)
            # The device's own arrays a decoder takes at once, and writes its results always to the same.
            some, k, v = map(decoder.plan.request.device.view, "qkv", (q[:, part], k, v))
            seen: dict[str, Any] = {"q_positions": np.array(stands[part])} if causal else {}
            if causal or begins is not None or lengths is None:
                decoder(some, k, v, lengths, begins=begins, **seen)
            else:
                end = int(lengths[0])  # as a slice it is one call of compiled code
                decoder(some, k[:, :end], v[:, :end])
            if len(stands) <= MOST_QUERIES:
                return results
            parts.append([one.clone() for one in results])
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 2)

    def step(self, q: Any, k: Any, v: Any, lengths: Any, scale: float) -> tuple[torch.Tensor, ...]:
        """As `attend`, of one query that sees `lengths` int64 [batch] of this rank's tokens, which lie where
        q does and are not looked at: a CUDA graph may hold it. Raises `TransportError` where the host moves
        the records of a GPU."""
        decoder, results = self._decoder(q, k, v, Scoring(scale), False)
        plan = decoder.plan
        if q.device.type == "cuda" and not plan.reducer.stream_ordered:
            raise TransportError(
                f"transport={plan.transport!r} moves records by the host, which a CUDA graph cannot: a "
                "cache of fixed room in a compiled model needs transport='peer' or 'nccl', or one rank"
            )
        decoder(*map(plan.request.device.view, ("q", "k", "v", "lengths"), (q, k, v, lengths)))
        return results

    def synchronize(self) -> None:
        """Wait for steps of one query that were queued to a GPU. Raises `TransportError`."""
        for planned in self._decoders.values():
            if 1 in planned:
                planned[1][0].synchronize()

    def _decoder(self, q: Any, k: Any, v: Any, scoring: Scoring, causal: bool) -> _Planned:
        batch, queries, heads, head_dim = q.shape
        kind = (batch, heads, head_dim, k.shape[2], v.shape[3], q.dtype, q.device, causal, *scoring)
        planned = self._decoders.setdefault(kind, {})
        found = planned.get(queries) if queries == 1 else planned.pop(queries, None)
        if found is None:
            if q.device.type == "cuda" and default_runtime().capturing():
                raise StateError("a step of a new kind is planned before it is captured: run one first")
            several = [length for length in planned if length > 1]
            if queries > 1 and len(several) == MOST_LENGTHS:
                planned.pop(several[0])[0].close()
            v_dim = None if v.shape[3] == head_dim else v.shape[3]
            decoder = Decoder(
                self.comm,
                heads=heads,
                kv_heads=k.shape[2],
                head_dim=head_dim,
                batch=batch,
                queries=queries,
                dtype=q.dtype,
                scheme=self._reduction,
                scale=scoring.scale,
                rules=scoring.rules(causal),
                device=q.device,
                cache=CacheFormat(positions="interleaved", v_dim=v_dim),
            )
            decoder.owner = self._owner
            found = decoder, tuple(map(as_tensor, (decoder.out, decoder.lse)))
        planned[queries] = found
        return found


_here = threading.local()


def alone() -> Plans:
    """Those of what a rank has whole, of this thread: nothing is sent. Where torch started the ranks, MPI is
    not asked."""
    started = dist.is_available() and dist.is_initialized()
    with _making:
        comm = _alone(dist.group.WORLD if started else None)
    if getattr(_here, "comm", None) is not comm:
        _here.comm, _here.plans = comm, Plans(comm, Reduction())
    made: Plans = _here.plans
    return made


_making = threading.Lock()  # two threads at once would make one group twice, which torch refuses


@functools.lru_cache(maxsize=1)  # groups may be destroyed, and others made
def _alone(world: Any) -> Any:
    """A communicator of this rank."""
    if world is None:
        return communicators.alone()
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return communicators.intracomm(group)
