"""Verdicts on results: the comparison with a reference, and the table and lines that show it."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from treeattn import files, reference
from treeattn.cli.options import Output
from treeattn.cli.problem import Problem
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.decoder import Decoder
from treeattn.errors import ArgumentError
from treeattn.mpi.communicators import collectively, must_match
from treeattn.partial import Array
from treeattn.report import LEGEND, Column, Progress, Report, identical
from treeattn.study import environment

Row = dict[str, Any]


class Judge:
    """Says, on rank 0, how far a result is from the oracle and from the tensors of a file. Making it is
    collective.

    rounded: as for `reference.error_bounds`.
    """

    def __init__(
        self, world: Communicator, problem: Problem, check: bool, expect: Path | None, rounded: bool
    ) -> None:
        self.against: dict[str, tuple[Array, Array]] = {}
        self.bounds: tuple[float, float] | None = None
        self._bringing_nan: list[int] = []
        expected = collectively(world, lambda: None if expect is None else _expected(expect, problem))
        if not check and expected is None:
            return
        if check:
            must_match(world, {"q": hashlib.sha256(problem.q.tobytes()).hexdigest()})
        partials = world.allgather(problem.partial())
        if world.rank:
            return
        self.bounds = reference.error_bounds(partials, rounded)
        self._bringing_nan = [rank for rank, part in enumerate(partials) if np.isnan(part.numerator).any()]
        if check:
            self.against["oracle"] = reference.combine(partials)
        if expected is not None:
            self.against["expected"] = expected

    def verdict(self, out: Array, lse: Array) -> dict[str, Any]:
        """errors: the largest |out - reference| and |lse - reference| of each. nan: how many results (rows of
        out, with their lse) are NaN, here and in each reference, and the ranks whose tokens bring it."""
        errors = {
            name: [
                float(reference.difference(mine, theirs).max(initial=0.0))
                for mine, theirs in zip((out, lse), right, strict=True)
            ]
            for name, right in self.against.items()
        }
        rows = {name: _nan_rows(*right) for name, right in {"": (out, lse), **self.against}.items()}
        mine = rows.pop("")
        nan = {
            "results": int(mine.sum()),
            "of": mine.size,
            "references": {name: int(theirs.sum()) for name, theirs in rows.items()},
            "same_rows": all(np.array_equal(mine, theirs) for theirs in rows.values()),
            "ranks": self._bringing_nan,
        }
        passed = all(np.less_equal(found, self.bounds).all() for found in errors.values() if self.bounds)
        return {"errors": errors, "nan": nan, "bounds": self.bounds, "passed": passed}


def _expected(path: Path, problem: Problem) -> tuple[Array, Array]:
    file, shape = files.open_cache(path), problem.shape
    out, lse = np.array(file["out"]), np.array(file["lse"])
    if (out.shape, lse.shape) != (shape.q_shape, shape.lse_shape):
        raise ArgumentError(f"{path}: out and lse do not have the shapes that {problem.source} gives")
    return out, lse


def _nan_rows(out: Array, lse: Array) -> Array:
    """Which results [batch, heads, queries] are NaN, in part or whole."""
    return np.swapaxes(np.isnan(out).any(axis=-1), 1, 2) | np.isnan(lse)


def timed(
    world: Communicator, decoder: Decoder, repeat: int, parts: Mapping[str, Callable[[], object]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each part on the slowest rank, in a first step and in the median of `repeat` more.

    Collective. A barrier before each part keeps waiting out of the next; what a GPU was given to do is waited
    for.
    """
    clock, say, steps = time.perf_counter, Progress(world.rank == 0), []
    for done in range(repeat + 1):
        seconds = {}
        for part, run in parts.items():
            world.barrier()
            began = clock()
            run()
            decoder.synchronize()
            seconds[part] = clock() - began
        everyone = world.allgather(seconds)
        steps.append({part: max(rank[part] for rank in everyone) for part in parts})
        say(f"{decoder.scheme}: {done:,} of {repeat:,} steps")
    return steps[0], {part: statistics.median(step[part] for step in steps[1:]) for part in parts}


def ended_with(
    world: Communicator, decoder: Decoder, judge: Judge, out: Array, lse: Array, reproducible: str | None
) -> Row:
    """Who made a result, what the judge says of it, its SHA-256, and how it is known that all ranks have the
    same bits. Collective."""
    proof, verdict = decoder.certificate, judge.verdict(out, lse)
    mine = hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest()
    same_bits = len(set(world.allgather(mine))) == 1
    return {
        "scheme": decoder.scheme,
        "executor": decoder.executor,
        "same_bits": same_bits,
        "determinism": "tokens" if reproducible else "measured" if proof is None else proof.determinism,
        "reproducible": reproducible,
        "sha256": mine,
        **verdict,
        "passed": world.bcast(verdict["passed"] and same_bits),
        "out": out,
        "lse": lse,
    }


def conclude(
    world: Communicator, problem: Problem, rows: list[Row], measured: list[Column[Row]], output: Output
) -> int:
    """Write the last result, and the table of all: rows as `ended_with` has them, with the columns of what
    was measured, and what they mean; the exit code. Collective."""
    out, lse = [(row.pop("out"), row.pop("lse")) for row in rows][-1]
    machine = environment.machine(world)
    passed = all(row["passed"] for row in rows)
    if world.rank:
        return int(not passed)
    output.tensors(out, lse, scale=repr(problem.scale), scheme=rows[-1]["scheme"])
    results = {"schemes": [row["scheme"] for row in rows], "results": rows}
    made = Report(problem.described | results | machine)
    ranks, nodes = len(machine["ranks"]), len({one["node"] for one in machine["ranks"]})
    where = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}, {problem.layout} shards"
    made.line(f"{problem.source.name}: {problem.held}, {problem.heads}")
    made.line(f"{where}; times: median step, slowest rank, µs\n")
    references = rows[0]["errors"]
    errors: list[Column[Row]] = [
        Column("error\nof out", partial(_worst, 0), ".1e"),
        Column("error\nof lse", partial(_worst, 1), ".1e"),
    ]
    made.table(rows, [
        Column("scheme", words=True),
        *(errors if references else ()),
        Column("identical\nbits", lambda row: identical(row["determinism"], row["same_bits"])),
        *measured,
        Column("verdict", _verdict),
    ])  # fmt: skip
    if references:
        bounds = "at most {:.1e} of out, {:.1e} of lse".format(*rows[0]["bounds"])
        made.line(f"errors: against {' and '.join(references)}; {bounds}")
    made.line(LEGEND)
    if references and rows[0]["reproducible"]:
        for digest in sorted({row["sha256"] for row in rows}):
            made.text(f"SHA-256 of out and lse, on any ranks and machine: {digest}")
    for row in rows:
        if row["nan"]["results"] or any(row["nan"]["references"].values()):
            made.line(f"{row['scheme']}: {_about_nan(row['nan'])}")
    if output.out is not None:
        made.text(f"out and lse are in {output.out}")
    made.note(machine["warning"])
    output.report(made)
    return int(not passed)


def _worst(index: int, row: Row) -> float:
    return max(float(errors[index]) for errors in row["errors"].values())


def _verdict(row: Row) -> str:
    judged = not row["nan"]["results"] or row["errors"]
    word = ("pass" if judged else "") if row["passed"] else "FAIL"
    return ", ".join(filter(None, (word, "NaN" if row["nan"]["results"] else "")))


def _about_nan(nan: dict[str, Any]) -> str:
    """How many results are NaN, whether they should be, and who brought it."""
    text = f"{nan['results']} of {nan['of']} results are NaN"
    if not nan["references"]:
        return f"{text}: --check tells whether they should be, and whose tokens bring it"
    text += "".join(f"; {name} has {wanted}" for name, wanted in nan["references"].items())
    ranks = ", ".join(f"rank {rank}" for rank in nan["ranks"]) or "no rank"
    heads = f"{'' if nan['same_rows'] else 'not '}in the same heads"
    return f"{text}, {heads}; the tokens of {ranks} bring it"
