"""``treeattn verify``: a token tree over a cache in a file, in one reduction over all ranks of the job."""

from __future__ import annotations

import hashlib
import statistics
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
import numpy as np

from treeattn import communicators, files, mpi_library, reference
from treeattn.agreement import collectively, must_match
from treeattn.cli.console import LEGEND, WIDE, Lines, console, identical, magnitude, microseconds, table
from treeattn.cli.problem import Problem, largest_difference, open_outputs
from treeattn.cli.scheme import given
from treeattn.errors import ArgumentError
from treeattn.report import as_json
from treeattn.shards import LAYOUTS, parse_layout
from treeattn.study import environment
from treeattn.token_tree import TokenTree, Verifier, accept_greedy
from treeattn.token_tree.owners import OWNERS, draft_owners

__all__ = ["command"]


@click.command("verify")
@click.argument("source", metavar="FILE.safetensors", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Write out and lse to this safetensors file.")
@click.option("--scheme", "schemes", default="hierarchical", show_default=True, metavar="S[,S..]",
              help="How partials are reduced over ranks; several, side by side.")  # fmt: skip
@click.option("--layout", default="contiguous", show_default=True, metavar="|".join(LAYOUTS),
              help="Which tokens of the context go to which rank.")  # fmt: skip
@click.option("--owner", type=click.Choice(OWNERS), default=None,
              help="Which rank counts which draft; default: owners of FILE, else single.")  # fmt: skip
@click.option("--repeat", type=click.IntRange(1), default=10, show_default=True,
              help="Timed steps after the first one.")  # fmt: skip
@click.option("--no-check", is_flag=True, help="Do not compare with the float64 oracle.")
@WIDE
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything measured.")
def command(
    source: Path,
    out: Path | None,
    schemes: str,
    layout: str,
    owner: str | None,
    repeat: int,
    no_check: bool,
    wide: bool,
    json_path: Path | None,
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
    chosen = parse_layout(layout)
    world = communicators.world()
    named = given(world, schemes)
    if out is not None and len(named) > 1:
        raise ArgumentError("--out takes the result of one scheme: name one with --scheme")
    options = (schemes, str(chosen), owner, repeat, no_check, str(source))
    must_match(world, {"the command line": options})
    write_out, write_json = open_outputs(world, [source], [out, json_path])
    problem = Problem(world, source, chosen, None)
    if problem.paged is not None:
        raise ArgumentError(f"{source}: verify takes a cache in rows, not in pages: leave block_table out")
    drafts = Drafts(world, problem, owner)
    oracle = None if no_check else drafts.oracle(world)
    rows = [_measure(world, drafts, oracle, scheme, repeat) for scheme in named]
    accepted = drafts.accepted(world)
    placement = environment.placement(world)
    if world.rank == 0:
        out_, lse = drafts.as_given(*rows[-1].pop("arrays"))
        write_out(files.save_tensors({"out": out_, "lse": lse}, {"scale": repr(problem.scale)}))
        write_json(as_json(_summary(drafts, rows, accepted, placement)))
        _print(console(wide), wide, drafts, rows, accepted, placement)
        if out is not None:
            print(f"out and lse are in {out}")
    return 0 if world.bcast(all(row["passed"] for row in rows)) else 1


class Drafts:
    """The tree of a file with what its nodes hold, in the order of its slots. Collective.

    Raises the same `ArgumentError` on every rank.
    """

    def __init__(self, world: Any, problem: Problem, owner: str | None) -> None:
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
        self.owners: Any = owner or "single"
        if owner is None and "owners" in given:
            self.owners = self._ordered("owners", given["owners"])

    def _ordered(self, name: str, array: Any) -> Any:
        """What nodes hold, by slots: parents of a file may stand in any order."""
        if array.shape[:2] != self.tree.origin.shape:
            raise ArgumentError(
                f"{self.problem.source}: {name} has shape {list(array.shape)}, [batch, nodes, ..] = "
                f"{list(self.tree.origin.shape)} is needed"
            )
        return np.array(array)[np.arange(self.tree.batch)[:, None], self.tree.origin]

    def as_given(self, out: Any, lse: Any) -> tuple[Any, Any]:
        """Results by the file's order."""
        rows, slots = np.nonzero(self.tree.real)
        places = self.tree.origin[rows, slots]
        out_, lse_ = np.zeros_like(out), np.full_like(lse, -np.inf)
        out_[rows, places], lse_[rows, :, places] = out[rows, slots], lse[rows, :, slots]
        return out_, lse_

    def oracle(self, world: Any) -> Any:
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

    def accepted(self, world: Any) -> list[dict[str, Any]]:
        """What the model's own tokens keep of each row, by the file's order. Collective."""
        if self.targets is None:
            return []
        first = self.problem.file.tensors.get("first_tokens")
        kept = accept_greedy(self.tree, self.targets, first=first, comm=world)
        return [
            {"path": self.tree.origin[row, kept.path[row, :count]].tolist(), "next_token": int(token)}
            for row, (count, token) in enumerate(zip(kept.counts, kept.next_tokens, strict=True))
        ]


def _measure(world: Any, drafts: Drafts, oracle: Any, scheme: str, repeat: int) -> dict[str, Any]:
    """One scheme: plan, first step, timed steps, verdicts. Collective."""
    problem, shape = drafts.problem, drafts.shape.plain
    nodes = shape.pop("queries")
    with Verifier(
        world, nodes=nodes, **shape, scheme=scheme, scale=problem.scale, owner=drafts.owners
    ) as verifier:
        step = (drafts.q, problem.k, problem.v, drafts.draft_k, drafts.draft_v, drafts.tree, problem.lengths)
        say, times = Lines(world.rank == 0), []
        for done in range(repeat + 1):
            world.Barrier()
            began = mpi_library.load().Wtime()
            out, lse = verifier(*step, shard_lengths=drafts.shard_lengths)
            times.append(max(world.allgather(mpi_library.load().Wtime() - began)))
            say(f"{scheme}: {done:,} of {repeat:,} steps")
        digest = hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest()
        same = len(set(world.allgather(digest))) == 1
        proof = verifier.decoder.certificate
        row: dict[str, Any] = {"scheme": scheme, "executor": verifier.decoder.executor, "same_bits": same}
        row["determinism"] = "measured" if proof is None else proof.determinism
        row |= {"first_step_s": times[0], "step_s": statistics.median(times[1:]), "sha256": digest}
        wanted, bounds = oracle or (None, None)
        errors = None if wanted is None else list(map(largest_difference, (out, lse), wanted))
        right = errors is None or all(
            error <= bound for error, bound in zip(errors, bounds or (), strict=True)
        )
        row |= {"errors": errors, "bounds": bounds, "passed": world.bcast(right) and same}
        return row | {"arrays": (out.copy(), lse.copy())}


def _summary(
    drafts: Drafts,
    rows: list[dict[str, Any]],
    accepted: list[dict[str, Any]],
    placement: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "input": str(drafts.problem.source),
        "tokens": drafts.problem.tokens,
        "layout": str(drafts.problem.layout),
        "scale": drafts.problem.scale,
        "shape": drafts.shape.plain,
        "nodes": drafts.tree.lengths.tolist(),
        "owner": drafts.owners if isinstance(drafts.owners, str) else "owners of the file",
        "results": [{name: value for name, value in row.items() if name != "arrays"} for row in rows],
        "accepted": accepted,
        "ranks": placement,
        "warning": environment.node_load(placement),
        "software": environment.software(),
    }


def _print(
    screen: Any,
    wide: bool,
    drafts: Drafts,
    rows: list[dict[str, Any]],
    accepted: list[dict[str, Any]],
    placement: list[dict[str, Any]],
) -> None:
    shape, problem = drafts.shape, drafts.problem
    heads = f"{shape.heads} heads ({shape.kv_heads} KV) x {shape.head_dim}"
    nodes = "+".join(map(str, drafts.tree.lengths.tolist()))
    screen.print(f"{problem.source.name}: {problem.tokens} tokens and {nodes} drafts, {heads}, {shape.dtype}")
    owner = drafts.owners if isinstance(drafts.owners, str) else "owners of the file"
    ranks = f"{len(placement)} rank{'s' * (len(placement) > 1)}"
    screen.print(f"{ranks}, {problem.layout} shards, drafts: {owner}; times: median step, slowest rank, µs\n")
    table(screen, {
        "scheme": itemgetter("scheme"),
        **{f"error\nof {name}": partial(_error, i) for i, name in enumerate(("out", "lse")[: 1 + wide])},
        "identical\nbits": lambda row: identical(row["determinism"], row["same_bits"]),
        "step": lambda row: microseconds(row["step_s"] * 1e6),
        "verdict": lambda row: "FAIL" if not row["passed"] else "pass" if row["errors"] else "",
    }, rows)  # fmt: skip
    if rows[0]["bounds"]:
        out, lse = rows[0]["bounds"]
        screen.print(f"errors: against the oracle; at most {out:.1e} of out, {lse:.1e} of lse")
    screen.print(LEGEND)
    for index, row in enumerate(accepted):
        path = " ".join(map(str, row["path"])) or "none"
        screen.print(f"row {index}: accepted {path}; next token {row['next_token']}")
    if warning := environment.node_load(placement):
        screen.print(f"note: {warning}", style="dim")


def _error(index: int, row: dict[str, Any]) -> str:
    return magnitude(row["errors"] and row["errors"][index])
