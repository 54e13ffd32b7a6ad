"""Tiny Llamas on the GPU against the processor: mpiexec -n 2 python -m gpu_day.model --json FILE

Each continues a text that repeats itself, with its weights on every rank and in parts, with drafts and
without; records and sums travel by way of the host. The exit code is 1 where tokens differ, or logits of the
prompt by more than 1e-4 of the largest: from the processor's, and from Hugging Face's where it was asked
(`tests/golden/llama`).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np

from tests.support.models import PROMPT, write_model
from treeattn import Reduction, communicators
from treeattn.backends.cuda import cupy_runtime
from treeattn.llama import Llama, Session
from treeattn.llama.drafts import NgramDrafts
from treeattn.llama.generate import Drafting, generate

BOUND = 1e-4
TEXT, TOKENS, NODES = [*PROMPT.tolist()[:40]] * 2, 24, 6
GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "llama" / "logits.npz"


class Case(NamedTuple):
    """changes: of the model's configuration."""

    model: str
    changes: tuple[tuple[str, int], ...]
    sharded: bool
    drafts: bool


#: Heads of 16 fill up those that there is a kernel for, heads of 64 need no filling.
CASES = tuple(
    Case(model, changes, sharded, drafts)
    for model, changes in (("biases", ()), ("grouped_llama3", (("head_dim", 64),)))
    for sharded, drafts in ((False, False), (True, False), (False, True))
)


def compare(world: Any, case: Case, folder: Path) -> dict[str, Any]:
    """One model on both devices, from a directory below `folder` that rank 0 writes. Collective."""
    path = folder / f"{case.model}-{len(case.changes)}"
    if world.rank == 0:
        write_model(path, case.model, **dict(case.changes))
    world.Barrier()
    (mine, made), (theirs, wanted) = (_continued(world, case, path, device) for device in ("cuda", "cpu"))
    references = {"processor": theirs}
    if not case.changes:
        references["transformers"] = np.load(GOLDEN)[f"{case.model}.logits"][0]
    return {
        "case": case._asdict() | {"changes": dict(case.changes)},
        "ranks": world.size,
        "same_tokens": made.tokens == wanted.tokens,
        "accepted": made.accepted,
        "largest_difference": {
            name: float(np.abs(mine - other).max() / np.abs(other).max())
            for name, other in references.items()
        },
        "step_s": statistics.median(made.step_s),
        "first_token_s": made.first_token_s,
    }


def _continued(world: Any, case: Case, path: Path, device: str) -> tuple[Any, Any]:
    """Logits after `PROMPT`, and what follows `TEXT`. Collective."""
    model = Llama(path, world if case.sharded else None, device=device)
    scheme = "head_scatter" if case.sharded else "hierarchical"
    given = {"scheme": Reduction(scheme, transport="host" if device == "cuda" else None)}
    with Session(world, model, PROMPT, capacity=len(PROMPT), **given) as session:
        logits = session.prefill()
    nodes = NODES if case.drafts else 0
    with Session(world, model, TEXT, capacity=len(TEXT) + TOKENS, drafts=nodes, **given) as session:
        drafting = Drafting(nodes, NgramDrafts() if world.rank == 0 else None) if nodes else None
        return logits, generate(session, TOKENS, drafting=drafting)


def wrong(row: dict[str, Any]) -> bool:
    """Whether the GPU said something else; NaN is something else."""
    return not (row["same_tokens"] and all(one <= BOUND for one in row["largest_difference"].values()))


def main() -> None:
    options = harness.options(__doc__, required=True)
    problem = cupy_runtime.problem()
    if problem:
        sys.exit(f"model.py: {problem}")
    world = communicators.world()
    cupy_runtime.choose(communicators.node_local_rank(world))
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(world.bcast(mine))
        rows = [compare(world, case, folder) for case in CASES]
        world.Barrier()  # nobody's directory goes before all have read it
    failed = [row for row in rows if wrong(row)]
    if world.rank == 0:
        options.write({"rows": rows})
        for row in failed:
            print("{case}: {largest_difference}, same tokens: {same_tokens}".format(**row))
        print(f"{len(rows) - len(failed)} of {len(rows)} models say on the GPU what they say elsewhere")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
