"""Steps of a reduction against the logarithm of the number of ranks: Theorem 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treeattn import collectives
from treeattn.collectives.clusters import description
from treeattn.study import laws
from treeattn.study.paper.experiment import MACHINE, Table, placed

TITLE = "steps of a reduction against log p"
WHERE = "section 5.1, Theorem 1: O(N/p + log p)"
PAPER = {
    "ranks": [8, 64, 128],
    "schemes": [
        "k_nomial_tree", "recursive_doubling", "binary_tree", "double_binary_tree", "hierarchical", "chain",
    ],
}  # fmt: skip
_STEPS = "steps: model (NCCL: hops up and down)"
_GPUS = 8  # of a node


def nccl_hops(gpus: int) -> int:
    """Messages one after the other in NCCL's tree: a chain within nodes, a binary tree between them, up and
    down (NCCL 2.30.7, src/graph/tuning.cc)."""
    return 2 * (_GPUS - 1 + (gpus // _GPUS).bit_length() - 1)


def model(ranks: Sequence[int], schemes: Sequence[str]) -> list[Table]:
    """Proved for the paper's numbers of GPUs, beside the theorem's; NCCL's tree last."""
    cluster = description.load(MACHINE)
    rows: list[dict[str, Any]] = []
    for size in ranks:
        for scheme in schemes:
            proved = collectives.check(placed(cluster, scheme, size)[0])
            rows.append({
                "ranks": size,
                "scheme": scheme,
                "depth: here, proved": proved.depth,
                "rounds: here, proved": proved.rounds,
                "steps: paper": f"O(log p), log2 p = {size.bit_length() - 1}",
                _STEPS: laws.reduction_steps(size, size),
            })  # fmt: skip
        rows.append(dict.fromkeys(rows[-1]))
        rows[-1] |= {"ranks": size, "scheme": "NCCL's tree", _STEPS: nccl_hops(size)}
    return [Table("the paper's numbers of GPUs, one token on each", rows)]
