"""This rank's part of a sharded cache, layer by layer.

Growing, keeping the accepted drafts, choosing sequences and taking tokens back need no message, and move no
token from rank to rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from treeattn.attention.arguments import CacheFormat, Shard
from treeattn.attention.positions import Runs
from treeattn.attention.shape import FLOAT8, Shape, check_axes, check_number, dtype_word
from treeattn.backends import device as devices
from treeattn.cache.placement import LayerPlan, Placement, Reach, Write, ordered, whole_numbers
from treeattn.collectives.runtime.communicator import Given
from treeattn.collectives.runtime.reducer import Owner
from treeattn.errors import ArgumentError
from treeattn.mpi import communicators
from treeattn.mpi.communicators import Agreement, collectively
from treeattn.partial import Array

if TYPE_CHECKING:
    from treeattn.token_tree import TokenTree


class CacheLayer:
    """One layer of a `ShardedCache`: its methods send nothing, and are of this layer alone."""

    def __init__(self, plan: LayerPlan, capacity: int, reach: Reach, owner: Owner) -> None:
        """An empty layer; `reach` is shared by layers of the same lengths, `owner` by all of a cache."""
        self._plan, self._capacity, self._reach = plan, capacity, reach
        self.owner = owner
        self._tree: TokenTree | None = None
        self._make_arrays()

    def _make_arrays(self) -> None:
        """For as many sequences as there are."""
        self._shape = replace(self._plan.shape, batch=len(self._reach.totals))
        self._hold(self._empty(self.positions.below(self._capacity)))
        self._drafts = self._empty(self._plan.drafts)
        self.lengths = self._reach.lengths.copy()

    def _empty(self, tokens: int) -> tuple[Array, ...]:
        """Arrays of so many tokens, for keys and, unless they are among these, for values."""
        plan, axes = self._plan, (self._shape.batch, tokens, self._shape.kv_heads)
        return tuple(plan.device.large((*axes, width), plan.elements) for width in plan.widths)

    def _hold(self, arrays: tuple[Array, ...]) -> None:
        self.arrays = arrays
        self.k: Array = arrays[0]
        self.v: Array | None = None if self._plan.latent else arrays[1]

    @property
    def rank(self) -> int:
        """The rank whose part this is."""
        return self._plan.placement.rank

    @property
    def size(self) -> int:
        """How many ranks hold parts."""
        return len(self._plan.placement.runs)

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that there is room for, on all ranks together."""
        return self._capacity

    @property
    def totals(self) -> Array:
        """Tokens of the whole sequences, int64 [batch], read-only."""
        return self._reach.totals

    @property
    def shard_lengths(self) -> Array:
        """Valid tokens of every rank's shard, int64 [ranks, batch], read-only; every rank computes it without
        a message."""
        return self._reach.shard_lengths

    @property
    def positions(self) -> Runs:
        """Positions of this shard's tokens, those to come among them."""
        return self._plan.placement.own

    @property
    def format(self) -> CacheFormat:
        """What a `Decoder` over this cache is planned with, as ``cache=``."""
        shape, v_dim = self._plan.shape, self._plan.shape.v_dim
        scales = {"k_scale": shape.k_scale, "v_scale": shape.v_scale}
        differs = v_dim != shape.head_dim or self._plan.latent
        return CacheFormat(shape.kv_dtype, v_dim if differs else None, positions=self.positions, **scales)

    @property
    def shard(self) -> Shard:
        """What a step takes in place of k, v and lengths; of an 8-bit or latent cache `decode`, too."""
        shape, latent = self._plan.shape, self._plan.latent
        more = {"k_scale": shape.k_scale, "v_scale": shape.v_scale, "dtype": shape.kv_dtype}
        more |= {"v_dim": shape.v_dim if latent else None, "positions": self.positions}
        return Shard(self.k, self.v, self.lengths, **more)

    def owners(self, positions: ArrayLike) -> Array:
        """The ranks of these positions, int64. Raises `ArgumentError` for one that is no rank's."""
        return self._plan.placement.owners(positions)

    def draft_positions(self, tree: TokenTree) -> Array:
        """Positions of the nodes of a tree, int64 [batch, L], after the sequence; pads as node 0."""
        return self.totals[:, None] + tree.depths

    def append(self, k: Array, v: Array | None = None, counts: ArrayLike | None = None) -> None:
        """Add the next tokens of each sequence: k, v [batch, tokens, kv_heads, head_dim or v_dim], the same
        on every rank, of which each keeps its own.

        counts: [batch], how many of them each sequence gets; all unless said. Raises `ArgumentError`, and
        then nothing has changed.
        """
        given = self._as_stored(k, v)
        self._write(*self._reach.append(given[0].shape[1], counts), given)

    def append_own(self, k: Array, v: Array | None, counts: ArrayLike) -> None:
        """Add the next `counts` [batch] tokens of each sequence, of which k and v hold this rank's alone:
        [batch, own tokens, kv_heads, head_dim or v_dim], in order, for rows that get fewer the first ones.

        Raises `ArgumentError`, and then nothing has changed.
        """
        given = self._as_stored(k, v)
        self._write(*self._reach.append(given[0].shape[1], counts, own=True), given)

    def written(self, tokens: int) -> None:
        """Count `tokens` more of each sequence, which somebody has written to the arrays."""
        self._stand(self._reach.append(tokens, None)[1])

    def select(self, rows: ArrayLike) -> None:
        """Go on with the sequences `rows`, integers [new batch], in this order, as beams do; one may come
        several times, or not at all. The same on every rank; drafts are forgotten.

        Raises `ArgumentError` for a sequence that is not there, and then nothing has changed.
        """
        self.owner.check()
        reach, chosen = self._reach.select(rows)
        before: Iterable[Any] = self.arrays
        if len(chosen) != len(self.totals):
            self._reach = reach
            self._make_arrays()
            moves = list(enumerate(chosen))
        else:
            moves = [(new, old) for new, old in enumerate(chosen) if new != old]
            before = [{old: array[old, : reach.most].copy() for _, old in moves} for array in before]
        for array, rows_before in zip(self.arrays, before, strict=True):
            for new, old in moves:
                length = int(reach.lengths[new])
                array[new, :length] = rows_before[old][:length]
        self._stand(reach)

    def propose(self, draft_k: Array, draft_v: Array, tree: TokenTree) -> None:
        """Hold the keys and values of draft tokens, [batch, L, kv_heads, head_dim or v_dim], until `commit`.

        They are copied beside the shard, nothing else changes. Raises `ArgumentError` for a tree of another
        batch, or larger than `drafts`.
        """
        if tree.batch != len(self.totals):
            raise ArgumentError(f"the tree has {tree.batch} rows, the cache {len(self.totals)} sequences")
        given = self._as_stored(draft_k, draft_v)
        tokens, most = given[0].shape[1], self._plan.drafts
        if tokens != tree.nodes or tokens > most:
            raise ArgumentError(
                f"drafts of {tokens} tokens for a tree of {tree.nodes} slots: the same number, and at most "
                f"drafts={most}, is needed"
            )
        for held, new in zip(self._drafts, given, strict=True):
            held[:, :tokens] = new
        self._tree = tree

    def commit(self, path: ArrayLike) -> None:
        """Append the drafts on a path and forget the others.

        path: [batch, longest] slots of the proposed tree, from the root on, then -1, as `Accepted.path` has
        it; the same on every rank. Nothing is sent, and nothing of the context moves.

        Raises `ArgumentError` for what is no path, or without `propose`; then nothing has changed.
        """
        self.owner.take()
        tree, rows = self._tree, whole_numbers("path", path)
        if tree is None:
            raise ArgumentError("there are no drafts to commit: propose them first")
        if rows.ndim != 2 or len(rows) != tree.batch:
            raise ArgumentError(f"path is {list(rows.shape)}: slots, then -1, for each of {tree.batch} rows")
        paths = [tree.check_path(row, _until_minus_one(slots)) for row, slots in enumerate(rows)]
        writes, reach = self._reach.append(rows.shape[1], [len(slots) for slots in paths])
        writes = [
            one._replace(rows=row, chosen=ordered(paths[row][one.chosen]))
            for one in writes
            for row in (range(tree.batch) if isinstance(one.rows, slice) else (one.rows,))
        ]
        self._write(writes, reach, self._drafts)

    def rollback(self, totals: ArrayLike | None = None) -> None:
        """Forget the proposed drafts and all tokens from `totals` [batch] on; without it, the drafts alone.

        Raises `ArgumentError` for more tokens than there are.
        """
        self.owner.check()
        if totals is not None:
            self._stand(self._reach.rollback(totals))
        self._tree = None

    def _write(self, writes: list[Write], reach: Reach, given: tuple[Array, ...]) -> None:
        self._reserve(reach)
        for rows, into, chosen in writes:
            taken = self._plan.as_index(chosen)
            for shard, new in zip(self.arrays, given, strict=True):
                shard[rows, into] = new[rows, taken]
        self._stand(reach)

    def _reserve(self, reach: Reach) -> None:
        """Larger arrays where there is no room: by half at least, so that growing costs a token little."""
        if reach.longest <= self._capacity:
            return
        self._capacity, before = max(reach.longest, self._capacity + self._capacity // 2), self.arrays
        self._hold(self._empty(self.positions.below(self._capacity)))
        for new, old in zip(self.arrays, before, strict=True):
            for row, length in enumerate(self._reach.lengths.tolist()):
                new[row, :length] = old[row, :length]

    def _stand(self, reach: Reach) -> None:
        self._reach, self._tree = reach, None
        self.lengths[...] = reach.lengths

    def _as_stored(self, k: Array, v: Array | None) -> tuple[Array, ...]:
        """The arrays as they are to be stored, k and v or k alone. Raises `ArgumentError`."""
        self.owner.take()
        given: tuple[Array, ...] = (k,) if v is None else (k, v)
        if len(given) != len(self.arrays):
            raise ArgumentError(
                "v is missing: this cache has values of its own"
                if v is None
                else "v is not needed: the values are the first channels of k, pass None"
            )
        given = tuple(map(self._plan.device.view, ("k", "v"), given))
        check_axes("k", given[0])
        values = given[0][..., : self._shape.v_dim] if v is None else given[1]
        self._shape.check_cache(given[0], values, copied=True)
        elements = self.k.dtype  # perhaps their bits, as what is given may be
        return tuple(one if one.dtype == elements else one.view(elements) for one in given)


class ShardedCache(CacheLayer):
    """This rank's part of the keys and values of `batch` sequences. Creating it is collective.

    It is the first of `layers`. Methods other than `save` and `load` are those of one layer alone, and send
    nothing; layers that get the same tokens share what follows from the lengths of the sequences, and only
    the first of them computes it.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or torch.distributed.ProcessGroup, optional
        The ranks; unless given torch's default group where there is one, else COMM_WORLD.
    batch, kv_heads, head_dim : int
        As of a `Decoder`.
    capacity : int
        Tokens of the longest sequence, on all ranks together; an interleaved cache grows beyond it, into a
        larger array, without a message.
    dtype : str or dtype
        Of k and v: "bfloat16", "float16", "float32", "float64", "float8_e4m3fn" or "float8_e5m2".
    v_dim : int, optional
        Channels of the values; head_dim unless given.
    latent : bool
        Whether the values are the first `v_dim` channels of the keys: `v` is None then, and none is given.
    k_scale, v_scale : float or [kv_heads], optional
        What stored elements are multiplied with; caches of float8 need both.
    layout : str, Layout or integers [capacity]
        Which token goes to which rank: a layout of `capacity` tokens (interleaved keeps ranks balanced and
        grows; contiguous blocks fill one rank after the other), or the rank of each position.
    layers : int
        How many layers there are.
    drafts : int
        Slots of the largest tree that `propose` takes.
    device : {"cpu", "cuda"}
        Or torch's object; on a GPU the arrays then lie in the memory of torch's pool.

    Attributes
    ----------
    k, v : [batch, own tokens, kv_heads, head_dim], [.., v_dim]
        This rank's shard, valid up to `lengths`; other arrays only after they had to grow, or after `select`
        of another number of sequences.
    lengths : int64 [batch]
        Valid tokens of this shard, written in place.

    Raises
    ------
    ArgumentError
        The same on every rank: sizes below 1, a layout that does not fit, arguments that differ between
        ranks.

    Examples
    --------
    >>> cache = treeattn.ShardedCache(capacity=64, kv_heads=2, head_dim=8, dtype="float32")
    >>> k = np.zeros((1, 3, 2, 8), np.float32)
    >>> cache.append(k, k)  # three tokens; each rank keeps its own
    >>> out, lse = treeattn.decode(np.ones((1, 1, 4, 8), np.float32), cache.shard)
    >>> cache.totals.tolist(), round(float(lse[0, 0, 0]), 4)  # ln 3
    ([3], 1.0986)
    """

    def __init__(
        self,
        comm: Given = None,
        *,
        batch: int = 1,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: DTypeLike = "bfloat16",
        v_dim: int | None = None,
        latent: bool = False,
        k_scale: ArrayLike | None = None,
        v_scale: ArrayLike | None = None,
        layout: Any = "interleaved",
        layers: int = 1,
        drafts: int = 0,
        device: str = "cpu",
    ) -> None:
        comm = communicators.intracomm(comm)
        with Agreement(comm, "ShardedCache") as agreed:
            word = dtype_word(dtype)
            queries = "float32" if word in FLOAT8 else word
            rows = batch, 1, kv_heads, kv_heads, head_dim
            shape = Shape(*rows, queries, word, k_scale, v_scale, v_dim or 0)
            for name, value, least in (
                ("capacity", capacity, 1),
                ("layers", layers, 1),
                ("drafts", drafts, 0),
            ):
                check_number(name, value, least)
            if latent and shape.v_dim > head_dim:
                raise ArgumentError(
                    f"v_dim {shape.v_dim} of a latent cache must be a number of k's {head_dim} channels"
                )
            placement = Placement(layout, int(capacity), comm.rank, comm.size)
            plan = LayerPlan(shape, bool(latent), int(drafts), placement, devices.find(device))
            reach = Reach(placement, np.zeros(batch, np.int64))
            given = plan, int(capacity), reach, Owner("this cache")
            super().__init__(*given)
            self._others = tuple(CacheLayer(*given) for _ in range(1, layers))
            agreed.must_match = {
                "batch, kv_heads, head_dim, v_dim, dtype or scales": shape,
                "latent": latent,
                "capacity": capacity,
                "layers": layers,
                "drafts": drafts,
                "layout": tuple(placement.runs),
                "device": plan.device.name,  # torch's objects have numbers, too
            }
        self._comm = comm

    @property
    def layers(self) -> tuple[CacheLayer, ...]:
        """This layer, the first, and all others."""
        return (self, *self._others)

    def save(self, directory: str | Path, about: Mapping[str, Any] | None = None) -> None:
        """Write all layers into a directory that all ranks share: a safetensors file for each rank, and an
        index. Collective, and of the first layer.

        A cache that is there already is replaced in one moment: whenever a job is ended, the directory holds
        the old one or the new one, and where the file system knows locks (`flock`) a second job that saves
        there meanwhile is refused. about: what a reader may want to know, kept in the index as JSON.

        Raises, the same on every rank, `ArgumentError` for layers that do not hold the same tokens and for a
        directory where another job is saving, and `BackendError` where a rank cannot write, as on a full
        disk; then what was there is as it was.
        """
        from treeattn.cache import saved  # reads and checks JSON: for files alone

        saved.save(self._comm, self.layers, Path(directory), dict(about or {}))

    @classmethod
    def load(
        cls,
        directory: str | Path,
        comm: Given = None,
        *,
        layout: Any = "interleaved",
        capacity: int | None = None,
        drafts: int = 0,
        device: str = "cpu",
    ) -> ShardedCache:
        """The first layer of what `save` wrote, on any number of ranks and in any layout. Collective; each
        rank reads its own tokens alone.

        capacity: of the new cache, that of the saved one unless said; layout, drafts, device: as for a new
        one. Raises `ArgumentError`, the same on every rank, for a directory without a cache, a sequence
        longer than a layout that cannot grow ("contiguous") has room for, or a file that is missing, cut off
        or damaged, which is named.
        """
        from treeattn.cache import saved

        comm = communicators.intracomm(comm)
        index = saved.agree(comm, Path(directory))
        cache = cls(
            *(comm,),
            **index.held,
            latent=index.latent,
            layers=index.layers,
            layout=layout,
            drafts=drafts,
            capacity=index.capacity if capacity is None else capacity,
            device=device,
        )
        collectively(comm, lambda: saved.read_layers(cache.layers, Path(directory), index))
        return cache


def _until_minus_one(slots: Array) -> Array:
    """What stands before the first -1. Raises `ArgumentError` where more follows."""
    length = int((slots >= 0).sum())
    if (slots[:length] < 0).any() or (slots[length:] != -1).any():
        raise ArgumentError(f"path {slots.tolist()}: slots from the root on, and then nothing but -1")
    return slots[:length]
