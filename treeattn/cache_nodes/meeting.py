"""What model process and cache nodes do together, each on its end of the same calls."""

from __future__ import annotations

from dataclasses import fields

from treeattn.attention.shape import Shape, check_number
from treeattn.cache.index import Index, read_index
from treeattn.cache_nodes import memory
from treeattn.cache_nodes.tree import Tree, edges
from treeattn.cache_nodes.view import CachePlan
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.plan import schedule as planned
from treeattn.errors import RestrictionError
from treeattn.mpi.agreement import Agreement, collectively
from treeattn.selection import select

__all__ = ["agreed_capacity", "agreed_index", "meet"]


def meet(comm: MpiCommunicator, scheme: str | Schedule | None) -> Tree:
    """The tree of a scheme, `hierarchical` unless given. Collective.

    Raises, on every rank alike, where it is none.
    """
    selection = collectively(comm, lambda: select("hierarchical" if scheme is None else scheme))
    schedule = planned(selection, comm, "root")

    def check() -> Schedule:
        if schedule is None:
            raise RestrictionError(
                f"{selection.text} is no schedule: cache nodes take a tree, such as hierarchical"
            )
        edges(schedule)
        return schedule

    return Tree(comm, collectively(comm, check))


def agreed_index(comm: MpiCommunicator, directory: str) -> tuple[CachePlan, Index]:
    """What a saved cache holds, as every rank reads it. Collective. Raises, on every rank alike, as
    `read_index`."""
    index = collectively(comm, lambda: read_index(directory))
    return CachePlan(**{field.name: getattr(index, field.name) for field in fields(CachePlan)}), index


def agreed_capacity(
    comm: MpiCommunicator, plan: CachePlan, batch: int, wanted: int | None, free: int | None
) -> int:
    """Tokens of the longest sequence that all nodes together have room for. Collective.

    free: bytes that this node has left, None where nobody said. Raises `ArgumentError` on every rank alike.
    """
    with Agreement(comm) as agreed:
        scales = plan.k_scale, plan.v_scale
        heads = plan.kv_heads, plan.kv_heads, plan.head_dim
        Shape(batch, 1, *heads, plan.q_dtype, plan.dtype, *scales, plan.v_dim)
        for name, value in (("layers", plan.layers), ("capacity", 1 if wanted is None else wanted)):
            check_number(name, value)
        agreed.share = free
    return memory.capacity(wanted, plan.token_bytes(batch), agreed.gathered[1:])
