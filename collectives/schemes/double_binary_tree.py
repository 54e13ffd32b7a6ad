"""Two binary trees, each over all ranks and half of the records, such that no rank is inner in both.

In one tree, half of the ranks are leaves that only send once: bandwidth lies idle. The second tree is the
first one mirrored (p even) or shifted by one rank (p odd), which makes the leaves of the one the inner
ranks of the other. The edges of both trees together take two colours such that no rank sends or receives
two messages of one colour; the rounds alternate between the colours, so that no rank ever has more than
one message to send and one to receive. With `chunks` above 1 each half is pipelined in that many pieces.

Cost: about 4 (log2(p) + c) (alpha + n beta / (2 c)) with c chunks per tree

Source: Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35 (2009).
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from treeattn.collectives.combinators import reversed_as_copies, then
from treeattn.collectives.schedule import Round, Schedule, Transfer, refuse_above_limit


class _Edge(NamedTuple):
    tree: int
    child: int
    parent: int


def double_binary_tree(size: int, chunks: int = 1) -> Schedule:
    """Two trees at once, each over half of the records; a rank is inner in at most one of them."""
    refuse_above_limit("double_binary_tree", size, 4 * chunks * (size - 1))
    parents = _in_order_parents(size)
    edges = [_Edge(0, rank, parent) for rank, parent in parents.items()]
    if size % 2 == 0:
        edges += [_Edge(1, size - 1 - rank, size - 1 - parent) for rank, parent in parents.items()]
    else:
        edges += [_Edge(1, (rank + 1) % size, (parent + 1) % size) for rank, parent in parents.items()]
    up = _pipelined(_first_rounds(edges, _two_colours(edges)), chunks)
    return Schedule("double_binary_tree", size, 2 * chunks, then(up, reversed_as_copies(up)))


def _in_order_parents(size: int) -> dict[int, int]:
    """Parent of each rank but the root, in the binary tree whose in-order walk is 0, 1, 2, ...

    Counted from 1, a rank's height is its number of trailing zero bits: odd ranks are the leaves.
    """
    parents = {}
    for place in range(1, size + 1):
        low = place & -place
        parent = (place ^ low) | (low << 1)
        if parent > size:
            parent = place ^ low  # the right spine hangs from the next rank to the left
        if parent:
            parents[place - 1] = parent - 1
    return parents


def _two_colours(edges: list[_Edge]) -> dict[_Edge, int]:
    """Colours 0 and 1 such that edges with a common sender, or a common receiver, differ.

    They always exist: each port has at most two edges, and each edge joins a send port to a receive port,
    so the ports form paths and cycles of even length.
    """
    at_port: defaultdict[tuple[str, int], list[_Edge]] = defaultdict(list)
    for edge in edges:
        at_port["send", edge.child].append(edge)
        at_port["receive", edge.parent].append(edge)
    colours: dict[_Edge, int] = {}
    for start in edges:
        waiting = [] if start in colours else [(start, 0)]
        while waiting:
            edge, colour = waiting.pop()
            colours[edge] = colour
            touching = at_port["send", edge.child] + at_port["receive", edge.parent]
            waiting += [(other, 1 - colour) for other in touching if other not in colours]
    return colours


def _first_rounds(edges: list[_Edge], colours: dict[_Edge, int]) -> dict[_Edge, int]:
    """The round of each edge's first chunk: of its colour, and after all that the child merges."""
    arriving: defaultdict[tuple[int, int], list[_Edge]] = defaultdict(list)
    for edge in edges:
        arriving[edge.tree, edge.parent].append(edge)
    first: dict[_Edge, int] = {}

    def place(edge: _Edge) -> int:
        if edge not in first:
            ready = max((place(below) + 1 for below in arriving[edge.tree, edge.child]), default=0)
            first[edge] = ready + (ready + colours[edge]) % 2
        return first[edge]

    for edge in edges:
        place(edge)
    return first


def _pipelined(first: dict[_Edge, int], chunks: int) -> tuple[Round, ...]:
    """Every second round, each edge carries the next chunk of its tree's half."""
    rounds: defaultdict[int, list[Transfer]] = defaultdict(list)
    for edge, start in first.items():
        for chunk in range(chunks):
            moved = edge.tree * chunks + chunk
            rounds[start + 2 * chunk].append(Transfer(edge.child, edge.parent, range(moved, moved + 1)))
    return tuple(tuple(rounds[number]) for number in sorted(rounds))
