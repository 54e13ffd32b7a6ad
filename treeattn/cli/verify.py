"""``treeattn verify``: a token tree over a cache in a file, in one reduction over all ranks of the job."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from treeattn import mpi_library, reference
from treeattn.agreement import collectively
from treeattn.cli import options
from treeattn.cli.options import FILE, Output
from treeattn.cli.problem import Problem, ended_with, heads_of, largest_difference, show_digests
from treeattn.cli.scheme import for_out, given
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ArgumentError
from treeattn.partial import Array
from treeattn.report import LEGEND, Column, Progress, Report, identical, microseconds
from treeattn.shards import Layout
from treeattn.study import environment
from treeattn.token_tree import TokenTree, Verifier, accept_greedy
from treeattn.token_tree.owners import OWNERS, draft_owners


@click.command("verify")
@click.argument("source", metavar="FILE.safetensors", type=FILE)
@click.option("--scheme", "schemes", metavar="S[,S..]",
              help="How partials are reduced over ranks; several, side by side. Default: by the nodes "
                   "of the job.")  # fmt: skip
@options.layout_option()
@click.option("--owner", type=click.Choice(OWNERS),
              help="Which rank counts which draft; default: owners of FILE, else single.")  # fmt: skip
@options.REPEAT
@click.option("--reproducible", is_flag=True,
              help="Bits that depend on the set of tokens alone, with their SHA-256.")  # fmt: skip
@click.option("--no-check", is_flag=True, help="Do not compare with the float64 oracle.")
@options.output_options("Write out and lse to this safetensors file.", json="Write everything measured.")
def command(
    source: Path,
    schemes: str | None,
    layout: Layout,
    owner: str | None,
    repeat: int,
    reproducible: bool,
    no_check: bool,
    output: Output,
) -> int:
    """Verify the draft tokens of FILE against its KV cache, every rank holding a shard of the context.

    FILE holds q [batch, nodes, heads, head_dim] and draft_k, draft_v [batch, nodes, kv_heads, head_dim] of
    the drafts, parents [batch, nodes] (-1: follows the context), and k, v [batch, tokens, kv_heads, head_dim]
    of the context. It may hold lengths [batch] of the context, draft_lengths [batch], owners [batch, nodes]
    (ranks), and tokens and target_tokens [batch, nodes]: the drafts, and what the model says after each, by
    which the accepted path is shown (first_tokens [batch]: after the context, if roots are drafts).
    The scale comes from the metadata entry "scale", else it is 1/sqrt(head_dim). Exit code 1 means that a
    result missed its bound or differed between ranks.
    """
    world = options.world()
    named = for_out(output, given(world, schemes) if schemes else [None])
    output.open(source, world=world)
    problem = Problem(world, source, layout, None)
    if problem.paged is not None:
        raise ArgumentError(f"{source}: verify takes a cache in rows, not in pages: leave block_table out")
    drafts = Drafts(world, problem, owner)
    oracle = None if no_check else drafts.oracle(world)
    rows = [_measure(world, drafts, oracle, scheme, reproducible, repeat) for scheme in named]
    results = [(row.pop("out"), row.pop("lse")) for row in rows]
    accepted = drafts.accepted(world)
    machine = environment.machine(world)
    if world.rank == 0:
        output.tensors(*drafts.as_given(*results[-1]), scale=repr(problem.scale))
        output.report(_report(drafts, rows, accepted, machine, output))
    return 0 if world.bcast(all(row["passed"] for row in rows)) else 1


#: (out, lse) of a float64 oracle, and the bounds of their errors.
Oracle = tuple[tuple[Array, Array], tuple[float, float]]


class Drafts:
    """The tree of a file with what its nodes hold, in the order of its slots. Collective.

    Raises the same `ArgumentError` on every rank.
    """

    def __init__(self, world: MpiCommunicator, problem: Problem, owner: str | None) -> None:
        self.problem, self.shape = problem, problem.shape
        collectively(world, lambda: self._read(owner))
        own = problem.lengths
        valid = np.full(self.shape.batch, problem.k.shape[1]) if own is None else own
        self.shard_lengths = world.allgather(valid.tolist())
        collectively(world, lambda: draft_owners(self.owners, self.tree, world.size, self.shard_lengths))

    def _read(self, owner: str | None) -> None:
        file, given = self.problem.file, self.problem.file.tensors
        if self.shape.mixed or self.problem.latent or self.shape.v_dim != self.shape.head_dim:
            raise ArgumentError(f"{file.path}: verify takes q, k and v of one type and one width")
        parents = file["parents"]
        if parents.shape != (self.shape.batch, self.shape.queries):
            raise ArgumentError(
                f"{file.path}: parents have shape {list(parents.shape)}, q is of [batch, nodes] = "
                f"{[self.shape.batch, self.shape.queries]}"
            )
        tokens = given.get("tokens", np.zeros(parents.shape, np.int64))
        self.tree = TokenTree.from_parents(tokens, parents, given.get("draft_lengths"))
        self.q = self._ordered("q", self.problem.q)
        self.draft_k, self.draft_v = (self._ordered(name, file[name]) for name in ("draft_k", "draft_v"))
        self.shape.check_cache(self.draft_k, self.draft_v)
        if "target_tokens" in given and "tokens" not in given:
            raise ArgumentError(f"{file.path}: target_tokens accept tokens, and it holds none")
        self.targets = (
            self._ordered("target_tokens", given["target_tokens"]) if "target_tokens" in given else None
        )
        self.owners: str | Array = owner or "single"
        if owner is None and "owners" in given:
            self.owners = self._ordered("owners", given["owners"])

    def step(self) -> tuple[Any, ...]:
        """What a `Verifier` takes, with `shard_lengths`."""
        context = self.problem.k, self.problem.v
        return (self.q, *context, self.draft_k, self.draft_v, self.tree, self.problem.lengths)

    def _ordered(self, name: str, array: Array) -> Array:
        """What nodes hold, by slots: parents of a file may stand in any order."""
        if array.shape[:2] != self.tree.origin.shape:
            raise ArgumentError(
                f"{self.problem.source}: {name} has shape {list(array.shape)}, [batch, nodes, ..] = "
                f"{list(self.tree.origin.shape)} is needed"
            )
        return np.array(array)[np.arange(self.tree.batch)[:, None], self.tree.origin]

    def as_given(self, out: Array, lse: Array) -> tuple[Array, Array]:
        """Results by the file's order."""
        rows, slots = np.nonzero(self.tree.real)
        places = self.tree.origin[rows, slots]
        out_, lse_ = np.zeros_like(out), np.full_like(lse, -np.inf)
        out_[rows, places], lse_[rows, :, places] = out[rows, slots], lse[rows, :, slots]
        return out_, lse_

    def oracle(self, world: MpiCommunicator) -> Oracle | None:
        """((out, lse), bounds of their errors) from float64 partials, on rank 0; else None. Collective."""
        mine = reference.partial(
            self.q, self.problem.k, self.problem.v, scale=self.problem.scale, lengths=self.problem.lengths
        )
        partials = world.gather(mine, root=0)
        if partials is None:
            return None
        seen = self.tree.mask & self.tree.real[..., None]
        scale = self.problem.scale
        partials.append(reference.partial(self.q, self.draft_k, self.draft_v, scale=scale, seen=seen))
        out, lse = reference.combine(partials)
        rows, slots = np.nonzero(~self.tree.real)
        out[rows, slots], lse[rows, :, slots] = 0, -np.inf
        return (out, lse), reference.error_bounds(partials)

    def accepted(self, world: MpiCommunicator) -> list[dict[str, Any]]:
        """What the model's own tokens keep of each row, by the file's order. Collective."""
        if self.targets is None:
            return []
        first = self.problem.file.tensors.get("first_tokens")
        kept = accept_greedy(self.tree, self.targets, first=first, comm=world)
        return [
            {"path": self.tree.origin[row, kept.path[row, :count]].tolist(), "next_token": int(token)}
            for row, (count, token) in enumerate(zip(kept.counts, kept.next_tokens, strict=True))
        ]


def _measure(
    world: MpiCommunicator,
    drafts: Drafts,
    oracle: Oracle | None,
    scheme: str | Schedule | None,
    reproducible: bool,
    repeat: int,
) -> dict[str, Any]:
    """One scheme: plan, first step, timed steps, verdicts. Collective."""
    problem, shape = drafts.problem, drafts.shape.plain
    nodes = shape.pop("queries")
    shape |= {"scheme": scheme, "scale": problem.scale, "owner": drafts.owners}
    kind = "tokens" if reproducible else None
    with Verifier(world, nodes=nodes, **shape, reproducible=kind) as verifier:
        step = drafts.step()
        say, times = Progress(world.rank == 0), []
        for done in range(repeat + 1):
            world.Barrier()
            began = mpi_library.load().Wtime()
            out, lse = verifier(*step, shard_lengths=drafts.shard_lengths)
            times.append(max(world.allgather(mpi_library.load().Wtime() - began)))
            say(f"{verifier.decoder.scheme}: {done:,} of {repeat:,} steps")
        row = ended_with(world, verifier.decoder, out, lse, kind)
        row |= {"first_step_s": times[0], "step_s": statistics.median(times[1:])}
        wanted, bounds = oracle or (None, None)
        errors = None if wanted is None else list(map(largest_difference, (out, lse), wanted))
        right = errors is None or all(
            error <= bound for error, bound in zip(errors, bounds or (), strict=True)
        )
        row |= {"errors": errors, "bounds": bounds, "passed": world.bcast(right) and row["same_bits"]}
        return row | {"out": out.copy(), "lse": lse.copy()}


def _report(
    drafts: Drafts,
    rows: list[dict[str, Any]],
    accepted: list[dict[str, Any]],
    machine: dict[str, Any],
    output: Output,
) -> Report:
    shape, problem, ranks = drafts.shape, drafts.problem, len(machine["ranks"])
    nodes = drafts.tree.lengths.tolist()
    owner = drafts.owners if isinstance(drafts.owners, str) else "owners of the file"
    made = Report({
        "input": str(problem.source),
        "tokens": problem.tokens,
        "layout": str(problem.layout),
        "scale": problem.scale,
        "shape": shape.plain,
        "nodes": nodes,
        "owner": owner,
        "results": rows,
        "accepted": accepted,
    }, machine)  # fmt: skip
    given = f"{problem.tokens} tokens and {'+'.join(map(str, nodes))} drafts"
    made.line(f"{problem.source.name}: {given}, {heads_of(shape)}, {shape.dtype}")
    where = f"{ranks} rank{'s' * (ranks > 1)}, {problem.layout} shards"
    made.line(f"{where}, drafts: {owner}; times: median step, slowest rank, µs\n")
    made.table(rows, [
        Column("scheme", words=True),
        *(Column(f"error\nof {name}", partial(_error, index), ".1e", wide=bool(index))
          for index, name in enumerate(("out", "lse"))),
        Column("identical\nbits", lambda row: identical(row["determinism"], row["same_bits"])),
        Column("step", lambda row: row["step_s"] * 1e6, microseconds),
        Column("verdict", lambda row: "FAIL" if not row["passed"] else "pass" if row["errors"] else ""),
    ])  # fmt: skip
    if rows[0]["bounds"]:
        out, lse = rows[0]["bounds"]
        made.line(f"errors: against the oracle; at most {out:.1e} of out, {lse:.1e} of lse")
    made.line(LEGEND)
    if rows[0]["reproducible"]:
        show_digests(made, rows)
    for index, row in enumerate(accepted):
        path = " ".join(map(str, row["path"])) or "none"
        made.text(f"row {index}: accepted {path}; next token {row['next_token']}")
    if output.out is not None:
        made.text(f"out and lse are in {output.out}")
    return made


def _error(index: int, row: dict[str, Any]) -> float | None:
    return float(row["errors"][index]) if row["errors"] else None
