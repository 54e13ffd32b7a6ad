"""What experiments share: tables, where the paper's settings are simulated, and the harness that runs the
small ones: schemes interleaved, results checked, everything kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from treeattn import collectives
from treeattn.collectives import Schedule
from treeattn.collectives.clusters import placement
from treeattn.collectives.clusters.description import Cluster
from treeattn.errors import TreeattnError
from treeattn.mpi import library
from treeattn.mpi.communicators import MpiCommunicator
from treeattn.study.compare.measure import Budget
from treeattn.study.compare.rows import Key
from treeattn.study.compare.sweep import sweep

#: The shipped description of the paper's cluster.
MACHINE = "dgx-h100"

#: What stands where the paper has a mark in a figure; no number was read off one.
IN_THE_FIGURE = "in the figure"

#: Columns that `Bench.block` gives, of each block of one key.
Blocks = list[dict[str, Any]]


class Table(NamedTuple):
    """rows: by heading, which names the unit and says whose number it is, a number, words in place of one, or
    None: not measured, or not said."""

    title: str
    rows: list[dict[str, float | str | None]]


def shown(value: float | str | None) -> str:
    """A cell as text: whole numbers in full, others to 4 significant digits."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:.4g}"


def placed(cluster: Cluster, scheme: str, ranks: int) -> tuple[Schedule, placement.Placement]:
    """A schedule for ranks of which neighbours share nodes, and where they sit."""
    places = placement.block(cluster, ranks)
    nodes = placement.node_groups(cluster, places) if collectives.needs_nodes(scheme) else None
    return collectives.build(scheme, ranks, nodes=nodes), places


def decode_key(scheme: str, ranks: int, tokens: int, heads: int, head_dim: int) -> Key:
    """A whole step: one query of one sequence, as many KV heads as heads, as in the paper."""
    return Key("decode", scheme, ranks, tokens, 1, 1, heads, heads, head_dim, "bfloat16")


@contextmanager
def first_ranks(comm: MpiCommunicator, ranks: int) -> Iterator[MpiCommunicator | None]:
    """A communicator of the first so many; the others sleep meanwhile, so that they take no core away.
    Collective."""
    member = comm.rank < ranks
    part: Any = comm.Split(0 if member else library.load().UNDEFINED, comm.rank)
    yield part if member else None
    if member:
        part.Free()
    comm.barrier_asleep()


def run(comm: MpiCommunicator, keys: Sequence[Key], effort: dict[str, Any]) -> dict[Key, Blocks]:
    """The blocks of every key in the order of `keys`, on rank 0; nothing elsewhere. Collective.

    keys: those of one number of ranks together, and of one case; of more ranks than there are, none is run.
    effort: of a `Budget`. Raises on all ranks what a scheme raised, and `TreeattnError` if a result missed
    its bound: then its time would mean nothing.
    """
    keys = [key for key in keys if key.ranks <= comm.size]
    blocks: dict[Key, Blocks] = {key: [] for key in keys} if comm.rank == 0 else {}
    problems: list[TreeattnError] = []
    for ranks, of_size in itertools.groupby(keys, lambda key: key.ranks):
        with first_ranks(comm, ranks) as part:
            for block, found in sweep(part, list(of_size), Budget(**effort)) if part is not None else ():
                if isinstance(found, TreeattnError):
                    problems.append(found)
                elif found is not None:
                    blocks[block.key].append(found)
    problems = comm.bcast(problems or [problem for key in blocks for problem in _missed(key, blocks[key])])
    if problems:
        raise problems[0]
    return blocks


def _missed(key: Key, blocks: Blocks) -> list[TreeattnError]:
    wrong = [
        f"{key.scheme} on {key.ranks} ranks: error {block['error_out']:.1e}, bound {block['bound_out']:.1e}, "
        "or bits that differ between ranks; what a wrong result costs is not shown"
        for block in blocks
        if not block["error_out"] <= block["bound_out"] or block.get("same_bits") is False  # NaN is wrong too
    ]
    return [TreeattnError(text) for text in wrong[:1]]
