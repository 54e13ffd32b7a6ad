"""Attention of a prompt that is dealt out over the ranks: every rank attends with its own tokens' queries.

`gather`: keys and values of all ranks come together, layer by layer, and a rank attends in one pass. `ring`:
blocks go round, a rank attends to one while the next arrives, and merges; no rank ever holds more than two.
Both see by position (`treeattn.attention.visibility`), so that any sharding is causal; zigzag balances the
work. What they need of memory goes with them: a prefill is closed before decode begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn.attention.positions import Runs, as_runs
from treeattn.attention.shape import Shape
from treeattn.attention.visibility import Visibility, Visible
from treeattn.collectives import waiting
from treeattn.collectives.reducer import duplicate
from treeattn.decoder import device as devices
from treeattn.llama.config import Config

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["PREFILLS", "Gather", "Prefill", "Ring"]


class _Local:
    """Causal attention of this rank's queries to one block of keys, as records."""

    def __init__(self, config: Config, positions: Runs) -> None:
        device, queries = devices.find("cpu"), len(positions)
        self.shape = Shape(1, queries, config.heads, config.kv_heads, config.head_dim, "float32")
        self._stands = positions.positions()
        self._tables = Visible(Visibility(causal=True), 1, queries)
        self.records = np.empty((*self.shape.lse_shape, config.head_dim + 2), np.float32)
        self._attention = device.attention(self.shape, self.records, self.shape.default_scale(), self._tables)

    def __call__(self, q: Any, k: Any, v: Any, positions: Runs) -> None:
        """Write the records of q [tokens, heads, head_dim] over k, v [keys, kv_heads, head_dim] at
        `positions`."""
        self._tables.look(positions, len(k), None, self._stands)
        self._attention(q[None], k[None], v[None], None)


class _Result:
    """Attention from records."""

    def __init__(self, local: _Local) -> None:
        self.out = np.empty(local.shape.q_shape, np.float32)
        lse = np.empty(local.shape.lse_shape, np.float32)
        self._finish = devices.find("cpu").finish(local.records, self.out, lse)

    def __call__(self) -> Any:
        self._finish()
        return self.out[0]


class Prefill(ABC):
    """A way to attend to a whole prompt, over a communicator of its own, so that a caller's messages stay the
    caller's. Planning, a call and closing are collective."""

    def __init__(self, comm: Intracomm, config: Config, shards: Sequence[Runs]) -> None:
        """shards: the positions of every rank."""
        self._comm, self._shards, own = duplicate(comm, "planning the prefill"), shards, shards[comm.rank]
        self._local = _Local(config, own) if len(own) else None
        self._result = _Result(self._local) if self._local else None

    @abstractmethod
    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """One layer: q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim] of this rank's tokens;
        what its queries make of all tokens up to their own, like q: an array of the next call too."""

    def __enter__(self) -> Prefill:
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Give the communicator back; not after an exception, when nobody may be waited for."""
        if exception[0] is None:
            self._comm.Free()


class Gather(Prefill):
    """One Allgatherv for keys and one for values in each layer; it holds one layer of the whole prompt."""

    def __init__(self, comm: Intracomm, config: Config, shards: Sequence[Runs]) -> None:
        """As `Prefill`."""
        super().__init__(comm, config, shards)
        self._counts = [len(runs) for runs in shards]
        held = np.concatenate([runs.positions() for runs in shards])
        self._order = np.argsort(held)
        self._all = as_runs(held[self._order])
        self._row = config.kv_heads, config.head_dim
        self._waits = waiting.Waits("the prefill gathers keys and values")

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """As `Prefill`."""
        k, v = self._together(k), self._together(v)
        if self._local is None or self._result is None:
            return q
        self._local(q, k, v, self._all)
        return self._result()

    def _together(self, own: Any) -> Any:
        whole = np.empty((sum(self._counts), *self._row), np.float32)
        width = self._row[0] * self._row[1]
        counts = [count * width for count in self._counts]
        with self._waits:
            self._comm.Allgatherv(np.ascontiguousarray(own), (whole, counts))
        return whole[self._order]


class Ring(Prefill):
    """Blocks of keys and values go from rank to rank; each is attended to while the next arrives."""

    def __init__(self, comm: Intracomm, config: Config, shards: Sequence[Runs]) -> None:
        """As `Prefill`."""
        super().__init__(comm, config, shards)
        if comm.size == 1:
            return
        most, width = max(len(runs) for runs in shards), config.head_dim + 2
        self._blocks = [np.empty((2, most, config.kv_heads, config.head_dim), np.float32) for _ in range(2)]
        self._before, self._after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        beside = " and ".join(f"rank {rank}" for rank in sorted({self._before, self._after}))
        self._waits = waiting.Waits("the prefill's ring", f"the blocks of {beside}")
        if self._local is not None:
            self._total = np.empty_like(self._local.records)
            operator = devices.find("cpu").merge_operator(config.head_dim, np.dtype(np.float32))
            flat = (array.reshape(-1, width) for array in (self._local.records, self._total))
            self._merge = operator.planned_merge(*flat)

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """As `Prefill`."""
        for owner, k_block, v_block in self._passing(k, v):
            self._attend(q, k_block, v_block, owner)
        return q if self._result is None else self._result()

    def _passing(self, k: Any, v: Any) -> Iterator[tuple[int, Any, Any]]:
        """Ranks, this one first, and their keys and values, each while the next arrive."""
        comm, own = self._comm, self._comm.rank
        if comm.size == 1:
            yield own, k, v
            return
        held, coming = self._blocks
        held[0, : len(k)], held[1, : len(v)] = k, v
        for step in range(comm.size):
            requests = []
            if step < comm.size - 1:
                requests = [comm.Irecv(coming, self._before), comm.Isend(held, self._after)]
            owner = (own - step) % comm.size
            yield owner, *held[:, : len(self._shards[owner])]
            with self._waits:
                for request in requests:
                    request.Wait()
            held, coming = coming, held

    def _attend(self, q: Any, k: Any, v: Any, owner: int) -> None:
        """Merge the block's records with those before, which wait in `_total`."""
        runs, first = self._shards[owner], owner == self._comm.rank
        if self._local is None or (not first and not len(runs)):
            return
        if not first:
            self._total[...] = self._local.records
        self._local(q, k, v, runs)
        if not first:
            self._merge()


#: By the name that the command line gives them.
PREFILLS: dict[str, type[Prefill]] = {"ring": Ring, "gather": Gather}
