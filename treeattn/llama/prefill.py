"""Attention of a prompt that is dealt out over the ranks: every rank attends with its own tokens' queries.

`gather`: keys and values of all ranks come together, layer by layer, and a rank attends in one pass. `ring`:
blocks go round, a rank attends to one while the next arrives, and merges; no rank ever holds more than two.
Both see by position (`treeattn.attention.visibility`), so that any sharding is causal; zigzag balances the
work. What they need of memory goes with them: a prefill is closed before decode begins. Keys and values go
by MPI, those of a GPU by way of the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import comm as comm_
from treeattn.attention.positions import Runs, as_runs
from treeattn.attention.visibility import Visibility, Visible
from treeattn.collectives import waiting
from treeattn.collectives.reducer import duplicate
from treeattn.llama.config import Config
from treeattn.llama.heads import Heads

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["PREFILLS", "Gather", "Prefill", "Ring", "ring_floats"]


class _Part:
    """Causal attention of some of this rank's queries, to blocks of keys one after the other."""

    def __init__(self, heads: Heads, stands: Any, out: Any, several: bool) -> None:
        """stands: their positions. out: [queries, heads, head_dim], for `finish`. several: whether more than
        one block comes."""
        device, shape = heads.device, heads.shape(len(stands))
        self._memory, empty = device.memory, device.memory.empty
        self._stands, self._tables = stands, Visible(Visibility(causal=True), 1, len(stands))
        self._records = empty((*shape.lse_shape, heads.head_dim + 2), np.float32)
        self._attention = device.attention(shape, self._records, heads.scale, self._tables)
        self.finish = device.finish(self._records, out[None], empty(shape.lse_shape, np.float32))
        if several:
            self._before = empty(self._records.shape, np.float32)
            operator = device.merge_operator(heads.head_dim, np.dtype(np.float32))
            flat = (array.reshape(-1, operator.width) for array in (self._records, self._before))
            self._merge = operator.planned_merge(*flat)

    def attend(self, q: Any, k: Any, v: Any, positions: Runs, first: bool) -> None:
        """Records of q [queries, heads, head_dim] over k, v [keys, kv_heads, head_dim] at `positions`, merged
        with those of the blocks before."""
        if not first:
            self._memory.copy(self._before, self._records)
        self._tables.look(positions, len(k), None, self._stands)
        self._attention(q[None], k[None], v[None], None)
        if not first:
            self._merge()


class Prefill(ABC):
    """A way to attend to a whole prompt, over a communicator of its own, so that a caller's messages stay the
    caller's. Planning, a call and closing are collective."""

    several = False

    def __init__(self, comm: Intracomm, heads: Heads, shards: Sequence[Runs]) -> None:
        """shards: the positions of every rank. Raises what planning raises, on every rank alike."""
        self._shards, self._device = shards, heads.device
        with comm_.Agreement(comm):
            self._plan(comm, heads)
        self._comm = duplicate(comm, "planning the prefill")

    def _plan(self, comm: Intracomm, heads: Heads) -> None:
        """All that a rank may have no memory for, before anyone waits for it."""
        stands, several = self._shards[comm.rank].positions(), self.several and comm.size > 1
        self._out = heads.device.memory.empty((len(stands), heads.heads, heads.head_dim), np.float32)
        blocks = _blocks(len(stands), heads.device.most_queries(heads.heads, heads.kv_heads))
        self._parts = [(rows, _Part(heads, stands[rows], self._out[rows], several)) for rows in blocks]

    @abstractmethod
    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """One layer: q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim] of this rank's tokens;
        what its queries make of all tokens up to their own, like q: an array of the next call too."""

    def _attend(self, q: Any, k: Any, v: Any, positions: Runs, first: bool = True) -> None:
        for rows, part in self._parts:
            part.attend(q[rows], k, v, positions, first)

    def _finished(self) -> Any:
        for _, part in self._parts:
            part.finish()
        return self._out

    def __enter__(self) -> Prefill:
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Give the communicator back; not after an exception, when nobody may be waited for."""
        if exception[0] is None:
            self._comm.Free()


def _blocks(queries: int, most: int | None) -> list[slice]:
    """Queries in as many parts as a device wants."""
    step = most or max(1, queries)
    return [slice(begin, begin + step) for begin in range(0, queries, step)]


class Gather(Prefill):
    """One Allgatherv for keys and one for values in each layer; it holds one layer of the whole prompt."""

    def _plan(self, comm: Intracomm, heads: Heads) -> None:
        super()._plan(comm, heads)
        self._counts = [len(runs) for runs in self._shards]
        held = np.concatenate([runs.positions() for runs in self._shards])
        self._order = np.argsort(held)
        self._all = as_runs(held[self._order])
        self._row = heads.kv_heads, heads.head_dim
        self._waits = waiting.Waits("the prefill gathers keys and values")

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """As `Prefill`."""
        self._attend(q, self._together(k), self._together(v), self._all)
        return self._finished()

    def _together(self, own: Any) -> Any:
        whole = np.empty((sum(self._counts), *self._row), np.float32)
        width = self._row[0] * self._row[1]
        counts = [count * width for count in self._counts]
        mine = np.ascontiguousarray(self._device.readable(own))
        with self._waits:
            self._comm.Allgatherv(mine, (whole, counts))
        return self._device.from_host(whole[self._order])


class Ring(Prefill):
    """Blocks of keys and values go from rank to rank; each is attended to while the next arrives."""

    several = True

    def _plan(self, comm: Intracomm, heads: Heads) -> None:
        super()._plan(comm, heads)
        if comm.size == 1:
            return
        most = max(len(runs) for runs in self._shards)
        self._blocks = [np.empty((2, most, heads.kv_heads, heads.head_dim), np.float32) for _ in range(2)]
        self._before, self._after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        beside = " and ".join(f"rank {rank}" for rank in sorted({self._before, self._after}))
        self._waits = waiting.Waits("the prefill's ring", f"the blocks of {beside}")

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """As `Prefill`."""
        for owner, k_block, v_block in self._passing(k, v):
            runs = self._shards[owner]
            if len(runs):
                self._attend(q, k_block, v_block, runs, first=owner == self._comm.rank)
        return self._finished()

    def _passing(self, k: Any, v: Any) -> Iterator[tuple[int, Any, Any]]:
        """Ranks, this one first, and their keys and values, each while the next arrive."""
        comm, own = self._comm, self._comm.rank
        if comm.size == 1:
            yield own, k, v
            return
        held, coming = self._blocks
        held[0, : len(k)], held[1, : len(v)] = self._device.readable(k), self._device.readable(v)
        for step in range(comm.size):
            requests = []
            if step < comm.size - 1:
                requests = [comm.Irecv(coming, self._before), comm.Isend(held, self._after)]
            owner = (own - step) % comm.size
            keys, values = held[:, : len(self._shards[owner])]
            yield owner, *((k, v) if step == 0 else map(self._device.from_host, (keys, values)))
            with self._waits:
                for request in requests:
                    request.Wait()
            held, coming = coming, held


def ring_floats(config: Config, head_dim: int, ranks: int) -> int:
    """What a rank holds of a token of its own while a ring runs the prompt, beside its cache: x, q, k and v,
    what they attend to, the records. With other ranks the records so far, and two blocks of keys and values.

    head_dim: of the kernels, as `Heads` has it.
    """
    records, kv = config.heads * (head_dim + 2), config.kv_heads * head_dim
    own = config.hidden_size + (config.heads + 2 * config.kv_heads) * config.head_dim
    return own + config.heads * head_dim + records + (records + 4 * kv if ranks > 1 else 0)


#: By the name that the command line gives them.
PREFILLS: dict[str, type[Prefill]] = {"ring": Ring, "gather": Gather}
