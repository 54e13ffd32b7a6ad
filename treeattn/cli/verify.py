"""``treeattn verify``: a token tree over a cache in a file, in one reduction over all ranks of the job."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from treeattn import reference
from treeattn.attention.arguments import Rules
from treeattn.cli import options
from treeattn.cli.options import FILE, Output
from treeattn.cli.problem import Problem
from treeattn.cli.scheme import for_out, given
from treeattn.cli.verdict import Judge, Row, conclude, ended_with, timed
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.errors import ArgumentError
from treeattn.mpi.communicators import collectively
from treeattn.partial import Array
from treeattn.report import Column, microseconds
from treeattn.shards import Layout
from treeattn.token_tree import TokenTree, Verifier
from treeattn.token_tree.owners import OWNERS, draft_owners


@click.command("verify")
@click.argument("source", metavar="FILE.safetensors", type=FILE)
@click.option("--scheme", "schemes", metavar="S[,S..]",
              help="How partials are reduced over ranks; several, side by side. Default: by the nodes "
                   "of the job.")  # fmt: skip
@options.LAYOUT
@click.option("--owner", type=click.Choice(OWNERS), default="single", help="Which rank counts which draft.")
@options.REPEAT
@click.option("--reproducible", is_flag=True,
              help="Bits that depend on the set of tokens alone, with their SHA-256.")  # fmt: skip
@click.option("--no-check", is_flag=True, help="Do not compare with the float64 oracle.")
@options.output_options("Write out and lse to this safetensors file.", json="Write everything measured.")
def command(
    source: Path,
    schemes: str | None,
    layout: Layout,
    owner: str,
    repeat: int,
    reproducible: bool,
    no_check: bool,
    output: Output,
) -> int:
    """Verify the draft tokens of FILE against its KV cache, every rank holding a shard of the context.

    FILE holds q [batch, nodes, heads, head_dim] and draft_k, draft_v [batch, nodes, kv_heads, head_dim] of
    the drafts, parents [batch, nodes] (an earlier node, or -1: follows the context), and k, v [batch, tokens,
    kv_heads, head_dim] of the context. It may hold lengths [batch] of the context and draft_lengths [batch];
    which path a model accepts is for Python (treeattn.token_tree.accept_greedy).
    The scale comes from the metadata entry "scale", else it is 1/sqrt(head_dim). Exit code 1 means that a
    result missed its bound or differed between ranks.
    """
    world = options.ranks()
    named = for_out(output, [None] if schemes is None else given(world, schemes))
    output.open(source, world=world)
    drafts = Drafts(world, source, layout, owner)
    judge = Judge(world, drafts, not no_check, None, False)
    context, kind = (drafts.k, drafts.v, drafts.draft_k, drafts.draft_v), "tokens" if reproducible else None
    planned = drafts.shape.plain | {"scale": drafts.scale, "owner": owner, "reproducible": kind}
    planned["nodes"] = planned.pop("queries")
    rows: list[Row] = []
    for scheme in named:
        with Verifier(world, **planned, scheme=scheme) as verifier:
            step = partial(
                verifier, drafts.q, *context, drafts.tree, drafts.lengths, shard_lengths=drafts.shard_lengths
            )
            first, others = timed(world, verifier.decoder, repeat, {"step": step})
            out, lse = map(np.copy, step())
            row = ended_with(world, verifier.decoder, judge, out, lse, kind)
        rows.append(row | {"first_step_s": first["step"], "step_s": others["step"]})
    return conclude(
        world, drafts, rows, [Column("step", lambda row: row["step_s"] * 1e6, microseconds)], output
    )


class Drafts(Problem):
    """A tree over the cache of a file, and what its nodes hold."""

    def __init__(self, world: Communicator, source: Path, layout: Layout, owner: str) -> None:
        super().__init__(world, source, layout)
        self.owner = owner
        collectively(world, self._read_nodes)
        self._counts_drafts = world.rank == 0
        self._valid = np.full(self.shape.batch, len(self.positions)) if self.lengths is None else self.lengths
        self.shard_lengths = world.allgather(self._valid.tolist())
        collectively(world, lambda: draft_owners(self.owner, self.tree, world.size, self.shard_lengths))

    @property
    def described(self) -> dict[str, Any]:
        return super().described | {"nodes": self.tree.lengths.tolist(), "owner": self.owner}

    @property
    def held(self) -> str:
        nodes = "+".join(map(str, self.tree.lengths.tolist()))
        return f"{super().held} and {nodes} drafts ({self.owner})"

    def _rules(self) -> Rules:
        """None: causal or not, a node sees the whole context and its ancestors."""
        if super()._rules().window is not None:
            raise ArgumentError(f"{self.source}: a node sees the whole context: leave window out")
        return Rules()

    def _read_nodes(self) -> None:
        held = self.file.tensors
        parents = self._of_nodes("parents")
        tokens = np.zeros(parents.shape, np.int64)  # no result depends on them
        self.tree = TokenTree.from_parents(tokens, parents, held.get("draft_lengths"))
        self.draft_k, self.draft_v = (self._of_nodes(f"draft_{name}") for name in "kv")
        self.shape.check_cache(self.draft_k, self.draft_v)

    def _of_nodes(self, name: str) -> Array:
        array, nodes = np.array(self.file[name]), self.shape.q_shape[:2]
        if array.shape[:2] != nodes:
            raise ArgumentError(
                f"{self.source}: {name} has shape {list(array.shape)}, q is of [batch, nodes] = {list(nodes)}"
            )
        return array

    def partial(self) -> reference.Partial:
        """Partials of the context, and on rank 0 of the drafts; pads see nothing."""
        real = self.tree.real[..., None]
        k, v, seen = self.k, self.v, (np.arange(self.k.shape[1]) < self._valid[:, None])[:, None] & real
        if self._counts_drafts:
            k, v = (np.concatenate(pair, axis=1) for pair in ((k, self.draft_k), (v, self.draft_v)))
            seen = np.concatenate([seen, self.tree.mask & real], axis=2)
        return reference.partial(self.q, k, v, scale=self.scale, seen=seen)
