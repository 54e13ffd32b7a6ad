"""All draft tokens attend to the whole sharded context and to their ancestors, in one reduction.

What a rank knows of a draft token is a record as ever: of its part of the context, which every node sees
whole, and of those ancestors whose keys it counts. The context pass needs no mask and reads the cache once
for all nodes; the mask is over the few draft tokens alone. Records of both merge where they are made, and
what travels is batch * L * heads * (head_dim + 2) numbers, once.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import comm as comm_
from treeattn.attention import arrays
from treeattn.attention.shape import Shape, dtype_name
from treeattn.attention.visibility import Visibility, Visible
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import Decoder
from treeattn.decoder import device as devices
from treeattn.decoder.device import Device
from treeattn.decoder.plan import folding
from treeattn.decoder.projection import Projection
from treeattn.errors import ArgumentError
from treeattn.token_tree.owners import check_owner, draft_owners
from treeattn.token_tree.tree import TokenTree

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Verifier", "verify"]

_NAMES = ("q", "k", "v", "draft_k", "draft_v")


def verify(
    q: Any,
    k: Any,
    v: Any,
    draft_k: Any,
    draft_v: Any,
    tree: TokenTree,
    *,
    comm: Intracomm | None = None,
    scheme: str | Schedule = "hierarchical",
    scale: float | None = None,
    lengths: Any = None,
    owner: Any = "single",
    device: str | None = None,
    transport: str | None = None,
    dtype: str | None = None,
    executor: str | None = None,
    project: Any = None,
) -> tuple[Any, Any]:
    """Exact attention of the nodes of a token tree over a sharded context and their ancestors. Collective.

    Args:
        q: [batch, L, heads, head_dim], of the nodes, the same on every rank. Arrays as `treeattn.decode`
            takes them.
        k, v: [batch, tokens, kv_heads, head_dim], this rank's shard of the context; any tokens, also none.
        draft_k, draft_v: [batch, L, kv_heads, head_dim], of the nodes, the same on every rank.
        tree: a `TokenTree` of `batch` rows and L slots, the same on every rank. What stands in pads, in any
            array, is without effect.
        lengths: [batch], valid tokens of this shard, default all.
        owner: who counts which draft: "single", "position", "round_robin" or ranks [batch, L]; see
            `treeattn.token_tree.owners.draft_owners`. The result is the same for each.
        comm, scheme, scale, device, transport, dtype, executor: as for `treeattn.decode`. Schemes that attend
            while they communicate, and those that leave each rank a slice, are refused.
        project: [heads, head_dim, out_dim], the same on every rank: out is then [batch, L, heads, out_dim],
            as `treeattn.Decoder` has it.

    Returns:
        out, like q in float32 (float64 for float64 inputs), and the natural-log lse [batch, heads, L], both
        the same on every rank. Pads have out 0 and lse -inf.

    Raises, on every rank alike:
        ArgumentError: arrays that do not fit each other, or q, drafts or trees that differ between ranks.
        ScheduleError, RestrictionError, BackendError, TransportError: as `treeattn.decode`.
    """
    comm = comm_.intracomm(comm)
    with comm_.Agreement(comm) as agreed:
        where = devices.find(arrays.device_of("q", q) if device is None else device)
        given = [where.tensor(*one, dtype) for one in zip(_NAMES, (q, k, v, draft_k, draft_v), strict=True)]
        shape = _shape(tree, given)
        lengths = where.lengths(shape, lengths, given[1].shape[1])
        valid = np.full(tree.batch, given[1].shape[1]) if lengths is None else where.to_host(lengths)
        agreed.equal = {
            "the shape or dtype of q, k, v": shape,
            "the tree": tree.digest,
            **{name: _digest(where, given[_NAMES.index(name)], tree) for name in ("q", "draft_k", "draft_v")},
        }
        agreed.told = valid.tolist()
    planned = shape.plain
    with Verifier(
        comm,
        nodes=planned.pop("queries"),
        **planned,
        scheme=scheme,
        scale=scale,
        device=where.name,
        transport=transport,
        owner=owner,
        executor=executor,
        project=project,
    ) as verifier:
        step: Any = (*given, tree, lengths)
        return arrays.give(verifier(*step, shard_lengths=agreed.everywhere), q)


class Verifier:
    """A planned `verify`: everything that can be done once is done once. Creating it is collective.

    Arguments as for `verify`; shapes and dtype are fixed here, nodes is L. A call returns (out, lse) in the
    verifier's own buffers, which hold until its next call. It compares nothing between ranks and sends
    nothing beside the one reduction; `decoder` is what makes the context pass and the reduction, with its
    `sent`, `schedule` and `certificate`.
    """

    def __init__(
        self,
        comm: Intracomm | None = None,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        nodes: int,
        batch: int = 1,
        dtype: str = "bfloat16",
        scheme: str | Schedule = "hierarchical",
        scale: float | None = None,
        device: str = "cpu",
        transport: str | None = None,
        owner: Any = "single",
        executor: str | None = None,
        project: Any = None,
    ) -> None:
        comm = comm_.intracomm(comm)
        with comm_.Agreement(comm) as agreed:
            agreed.equal = {"owner": check_owner(owner)}
            folding(scheme, "drafts join the records of the context before a reduction to every rank")
            self.shape = Shape(batch, nodes, heads, kv_heads, head_dim, dtype)
            self._device = devices.find(device)
            self._device.check_shape(self.shape)
            projection = None if project is None else Projection(project, self.shape)
            self._drafts = _Drafts(self.shape, self._device, scale, projection)
        self.owner, self._size, self._rank = owner, comm.size, comm.rank
        self.decoder = Decoder(
            comm,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            batch=batch,
            queries=nodes,
            dtype=dtype,
            scheme=scheme,
            scale=scale,
            device=device,
            transport=transport,
            executor=executor,
            project=project,
        )
        self._merge = self._drafts.merged_into(self.decoder.records)
        self._containers = arrays.Containers(self._device.view, (self.decoder.out, self.decoder.lse))

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        draft_k: Any,
        draft_v: Any,
        tree: TokenTree,
        lengths: Any = None,
        *,
        shard_lengths: Any = None,
        owner: Any = None,
    ) -> tuple[Any, Any]:
        """One step: (out, lse), valid until the next call. Every rank must call.

        shard_lengths: [ranks, batch] valid tokens of the context on each rank, as `ShardedCache` knows them:
        by these "single" and "position" choose. owner: another one for this step, such as ranks [batch, L].
        Both must be the same on every rank.

        Raises `ArgumentError` for arrays that do not fit the plan, on one rank alone as a `Decoder` does.
        """
        q, k, v, draft_k, draft_v = self._containers.take(q, k, v, draft_k, draft_v, names=_NAMES)
        _check_tree(tree)
        owners = draft_owners(self.owner if owner is None else owner, tree, self._size, shard_lengths)
        _check_drafts(self.shape, tree, draft_k, draft_v)
        self.decoder.local(q, k, v, lengths)
        if self._drafts.attend(q, draft_k, draft_v, tree, owners == self._rank):
            self._merge()
        self.decoder.reduce()
        self.decoder.finish()
        self._blank(tree)
        return self._containers.give()

    def _blank(self, tree: TokenTree) -> None:
        """Pads saw the context, too. They are the last slots of a row."""
        for row, nodes in enumerate(tree.lengths.tolist()):
            if nodes < tree.nodes:
                self.decoder.out[row, nodes:] = 0
                self.decoder.lse[row, :, nodes:] = -np.inf

    def close(self) -> None:
        """Release communicator and requests. Collective."""
        self.decoder.close()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.decoder.__exit__(*exception)


class _Drafts:
    """The masked pass over draft tokens, into records of its own."""

    def __init__(
        self, shape: Shape, device: Device, scale: float | None, projection: Projection | None
    ) -> None:
        first = projection if projection is not None and projection.narrows else None
        width = (shape.head_dim if first is None else first.out_dim) + 2  # as the context's records have
        self._shape, self._device = shape, device
        self._records = device.memory.empty((*shape.lse_shape, width), shape.record_dtype)
        self._visible = Visible(Visibility(), shape.batch, shape.queries)
        scale = shape.default_scale() if scale is None else float(scale)
        given = shape, self._records, scale, self._visible
        self._attention = device.attention(*given) if first is None else first.before_merging(device, *given)
        self._seen: tuple[TokenTree | None, Any] = None, None

    def merged_into(self, records: Any) -> Any:
        """A call that folds the records of drafts into those of the context."""
        operator = self._device.merge_operator(self._records.shape[3] - 2, self._shape.record_dtype)
        own, other = (array.reshape(-1, operator.width) for array in (records, self._records))
        return operator.planned_merge(own, other)

    def attend(self, q: Any, draft_k: Any, draft_v: Any, tree: TokenTree, mine: Any) -> bool:
        """Each node to those ancestors that are `mine`, bool [batch, L]; whether there are any at all."""
        mine = mine & tree.real
        if not mine.any():
            return False
        if self._seen[0] is not tree or not np.array_equal(self._seen[1], mine):
            seen = tree.mask & tree.real[:, :, None] & mine[:, None, :]
            self._visible.look(None, tree.nodes, mask=seen)
            self._seen = tree, mine
        self._device.admit(self._shape, q, draft_k, draft_v, None)
        self._attention(q, draft_k, draft_v, None)
        return True


def _shape(tree: TokenTree, given: list[Any]) -> Shape:
    """Of a step whose arrays fit each other and the tree. Raises `ArgumentError`."""
    q, k, v, draft_k, draft_v = given
    _check_tree(tree)
    elements = dtype_name(q, "bfloat16" if q.dtype == np.uint16 else None)
    shape = Shape(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3], elements)
    shape.check_query(q)
    shape.check_cache(k, v)
    _check_drafts(shape, tree, draft_k, draft_v)
    shape.check_cache(draft_k, draft_v)
    return shape


def _check_tree(tree: Any) -> None:
    if not isinstance(tree, TokenTree):
        raise ArgumentError(f"tree is a {type(tree).__name__}: a treeattn.token_tree.TokenTree is needed")


def _check_drafts(shape: Shape, tree: TokenTree, draft_k: Any, draft_v: Any) -> None:
    if (tree.batch, tree.nodes) != (shape.batch, shape.queries):
        raise ArgumentError(
            f"the tree has {tree.batch} rows of {tree.nodes} slots, but q is of {shape.batch} rows of "
            f"{shape.queries}"
        )
    for name, array in (("draft_k", draft_k), ("draft_v", draft_v)):
        wanted = [shape.batch, shape.queries, shape.kv_heads, shape.head_dim]
        if list(array.shape) != wanted:
            raise ArgumentError(
                f"{name} has shape {list(array.shape)}, expected [batch, L, kv_heads, head_dim] = {wanted}"
            )


def _digest(device: Device, array: Any, tree: TokenTree) -> str:
    """Of what nodes hold: pads may differ between ranks."""
    return hashlib.sha256(np.ascontiguousarray(device.to_host(array)[tree.real]).tobytes()).hexdigest()
