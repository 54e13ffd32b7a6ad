"""All draft tokens attend to the whole sharded context and to their ancestors, in one reduction.

What a rank knows of a draft token is a record as ever: of its part of the context, which every node sees
whole, and of those ancestors that it owns. The context pass needs no mask and reads the cache once for all
nodes; the mask is over the few draft tokens alone. Records of both merge where they are made, and what
travels is batch * L * heads * (head_dim + 2) numbers, once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from treeattn.attention import arrays
from treeattn.attention.arguments import Rules, Shard
from treeattn.attention.arrays import AnyArray
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.shape import Shape
from treeattn.backends.device import Device, find
from treeattn.collectives.runtime.communicator import Given
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import Decoder
from treeattn.decoder.reducers import folding
from treeattn.decoder.request import Reduction, refuse, telling_arguments
from treeattn.errors import ArgumentError
from treeattn.mpi import communicators
from treeattn.mpi.communicators import Agreement
from treeattn.partial import Array
from treeattn.token_tree.owners import check_owner, draft_owners
from treeattn.token_tree.tree import TokenTree

_NAMES, _OVER = ("q", "k", "v", "draft_k", "draft_v"), "a tree is verified over"


@telling_arguments
def verify(
    q: AnyArray,
    k: AnyArray | Shard,
    v: AnyArray | None,
    draft_k: AnyArray,
    draft_v: AnyArray,
    tree: TokenTree,
    *,
    comm: Given = None,
    scheme: str | Schedule | Reduction | None = None,
    scale: float | None = None,
    lengths: ArrayLike | None = None,
    owner: str | ArrayLike = "single",
    device: str | None = None,
    reproducible: str | None = None,
) -> tuple[Array, Array]:
    """Exact attention of the nodes of a token tree over a sharded context and their ancestors. Collective.

    Parameters
    ----------
    q : [batch, L, heads, head_dim]
        Of the nodes, the same on every rank. Arrays as `treeattn.decode` takes them.
    k, v : [batch, tokens, kv_heads, head_dim]
        This rank's shard of the context; tokens may be 0. k may be a `treeattn.Shard` in a row of tokens, and
        v None then.
    draft_k, draft_v : [batch, L, kv_heads, head_dim]
        Of the nodes, the same on every rank.
    tree : TokenTree
        Of `batch` rows and L slots, the same on every rank. What pads hold, in any array, is without
        effect.
    lengths : [batch], optional
        Valid tokens of this shard; all unless given.
    owner : str or [batch, L]
        Which rank attends to a draft: "single", "position", "round_robin" or ranks; see
        `treeattn.token_tree.owners.draft_owners`. The result is the same for each.
    comm, scheme, scale, device, reproducible
        As for `treeattn.decode`. Schemes that attend while they communicate, and those that leave each rank
        a slice, are refused.

    Returns
    -------
    out : [batch, L, heads, head_dim]
        float32 (float64 for float64 inputs), the same on every rank; 0 in pads.
    lse : [batch, heads, L]
        Natural logarithm, -inf in pads.

    Raises
    ------
    ArgumentError, ScheduleError, RestrictionError, BackendError, TransportError
        The same on every rank; also for q, drafts or trees that differ between ranks.

    Examples
    --------
    >>> tree = treeattn.token_tree.TokenTree.from_paths([[7, 1], [7, 3]])
    >>> q, drafts = np.ones((1, 3, 4, 8), np.float32), np.zeros((1, 3, 2, 8), np.float32)
    >>> context = np.zeros((1, 5, 2, 8), np.float32)  # this rank's part of it
    >>> out, lse = treeattn.token_tree.verify(q, context, context, drafts, drafts, tree)
    >>> np.exp(lse[0, 0]).round(3).tolist()  # the context, and itself, and the root
    [6.0, 7.0, 7.0]
    """
    comm = communicators.intracomm(comm)
    with Agreement(comm, "verify") as agreed:
        where = find(arrays.device_of("q", q) if device is None else device, reproducible, comm.size)
        shard = Shard.of(k, v, lengths).in_rows(_OVER)
        query, held, shape, tokens = where.admit(q, shard, scale)
        keys = where.tensor("draft_k", draft_k, shard.dtype)
        values = where.tensor("draft_v", draft_v, shard.dtype)
        _check_drafts(shape, tree, keys, values)
        agreed.must_match = {
            "the shape or dtype of q, k, v": shape,
            "the tree": tree.digest,
            "q": _digest(where, query, tree),
            "draft_k": _digest(where, keys, tree),
            "draft_v": _digest(where, values, tree),
        }
        valid = where.host_lengths(held.lengths)
        agreed.share = [tokens] * tree.batch if valid is None else np.asarray(valid).tolist()
    planned = shape.plain
    planned |= {"nodes": planned.pop("queries"), "scheme": scheme, "scale": scale, "device": where.name}
    planned |= {"owner": owner, "reproducible": reproducible}
    with Verifier(comm, **planned) as verifier:
        results = verifier(query, held, None, keys, values, tree, shard_lengths=agreed.gathered)
        return arrays.give(results, q)


class Verifier:
    """A planned `verify`: everything that can be done once is done once. Creating it is collective.

    Arguments as for `verify`; shapes and dtype are fixed here, nodes is L. A call returns (out, lse) in the
    verifier's own buffers, which hold until its next call. It compares nothing between ranks and sends
    nothing but the one reduction; `decoder` is what makes the context pass and the reduction, with its
    `sent`, `schedule` and `certificate`.

    >>> tree = treeattn.token_tree.TokenTree.from_paths([[7, 1], [7, 3]])
    >>> q, k = np.ones((1, 3, 4, 8), np.float32), np.zeros((1, 3, 2, 8), np.float32)
    >>> shape = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    >>> with treeattn.token_tree.Verifier(nodes=3, **shape) as verifier:
    ...     out, lse = verifier(q, k, k, k, k, tree)
    >>> out.shape
    (1, 3, 4, 8)
    """

    def __init__(
        self,
        comm: Given = None,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        nodes: int,
        batch: int = 1,
        dtype: str = "bfloat16",
        scheme: str | Schedule | Reduction | None = None,
        scale: float | None = None,
        device: str = "cpu",
        owner: str | ArrayLike = "single",
        reproducible: str | None = None,
    ) -> None:
        comm = communicators.intracomm(comm)
        with Agreement(comm, "Verifier") as agreed:
            agreed.must_match = {"owner": check_owner(owner), "nodes": nodes}
            because = "drafts join the records of the context before a reduction to every rank"
            self._device = find(device, reproducible, comm.size)
            folding(scheme, because, comm, self._device.name)
            self.shape = Shape(batch, nodes, heads, kv_heads, head_dim, dtype)
            refuse({"blocks": reproducible == "blocks", "mask": True})
            self._device.check_shape(self.shape)
            operator = self._device.merge_operator(self.shape.head_dim, self.shape.record_dtype)
            empty = self._device.memory.empty
            self._records = empty((*self.shape.lse_shape, operator.width), operator.dtype)  # of drafts
            self._tables = MaskTables(Rules(), batch, nodes)
            factor = self.shape.logit_scale(scale)
            self._attend = self._device.attention(self.shape, self._records, factor, self._tables)
            self._masked: tuple[TokenTree, Array] | None = None
        self.owner, self._size, self._rank = owner, comm.size, comm.rank
        how: dict[str, Any] = {"scheme": scheme, "reproducible": reproducible}
        self.decoder = Decoder(comm, **self.shape.plain, scale=scale, device=device, **how)
        records = (array.reshape(-1, operator.width) for array in (self.decoder.records, self._records))
        self._merge: Callable[[], object] = operator.planned_merge(*records)
        self._containers = arrays.Containers(self._device.view, (self.decoder.out, self.decoder.lse))

    def __call__(
        self,
        q: AnyArray,
        k: AnyArray | Shard,
        v: AnyArray | None,
        draft_k: AnyArray,
        draft_v: AnyArray,
        tree: TokenTree,
        lengths: ArrayLike | None = None,
        *,
        shard_lengths: ArrayLike | None = None,
        owner: str | ArrayLike | None = None,
    ) -> tuple[Array, Array]:
        """One step: (out, lse), valid until the next call. Every rank must call.

        shard_lengths: [ranks, batch] valid tokens of the context on each rank, as `ShardedCache` knows them:
        by these "single" and "position" choose. owner: another one for this step, such as ranks [batch, L].
        Both must be the same on every rank.

        Raises `ArgumentError` for arrays that do not fit the plan, on one rank alone as a `Decoder` does.
        """
        self.decoder.owner.take()
        if isinstance(k, Shard):
            shard = Shard.of(k, v, lengths).in_rows(_OVER)
            k, v, lengths = shard.k, shard.v, shard.lengths
        q, k, v, draft_k, draft_v = self._containers.take(q, k, v, draft_k, draft_v, names=_NAMES)
        _check_drafts(self.shape, tree, draft_k, draft_v)
        owners = draft_owners(self.owner if owner is None else owner, tree, self._size, shard_lengths)
        mine = tree.real & (owners == self._rank)
        self.decoder.local(q, k, v, lengths)
        if mine.any():
            self._mask(tree, mine)
            self._device.check(self.shape, q, draft_k, draft_v, None)
            self._attend(q, draft_k, draft_v, None)
            self._merge()
        self.decoder.reduce()
        self.decoder.finish()
        blank_pads(tree, self.decoder.out, self.decoder.lse)
        return self._containers.give()

    def _mask(self, tree: TokenTree, mine: Array) -> None:
        """Let each node see those ancestors that are `mine`, bool [batch, L]; trees mostly come again."""
        if self._masked is None or self._masked[0] is not tree or not np.array_equal(self._masked[1], mine):
            self._tables.update(None, tree.nodes, mask=tree.mask & tree.real[:, :, None] & mine[:, None, :])
            self._masked = tree, mine

    def close(self) -> None:
        """Release communicator and requests. Collective."""
        self.decoder.close()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *exception: object) -> None:
        self.decoder.__exit__(*exception)


def blank_pads(tree: TokenTree, out: Array, lse: Array) -> None:
    """Pads saw the context, too. They are the last slots of a row."""
    for row, nodes in enumerate(tree.lengths.tolist()):
        if nodes < tree.nodes:
            out[row, nodes:] = 0
            lse[row, :, nodes:] = -np.inf


def check_tree(tree: TokenTree, batch: int, queries: int) -> None:
    """Raise `ArgumentError` for a tree that does not fit q."""
    if not isinstance(tree, TokenTree):
        raise ArgumentError(f"tree is a {type(tree).__name__}: a treeattn.token_tree.TokenTree is needed")
    if (tree.batch, tree.nodes) != (batch, queries):
        raise ArgumentError(
            f"the tree has {tree.batch} rows of {tree.nodes} slots, but q is of {batch} rows of {queries}"
        )


def _check_drafts(shape: Shape, tree: TokenTree, draft_k: Array, draft_v: Array) -> None:
    check_tree(tree, shape.batch, shape.queries)
    shape.check_cache(draft_k, draft_v, "draft_")
    if draft_k.shape[1] != tree.nodes:
        raise ArgumentError(f"draft_k is of {draft_k.shape[1]} tokens, and q of {tree.nodes}")


def _digest(device: Device, array: Array, tree: TokenTree) -> str:
    """SHA-256 of what nodes hold: pads may differ between ranks."""
    return hashlib.sha256(np.ascontiguousarray(device.to_host(array)[tree.real]).tobytes()).hexdigest()
