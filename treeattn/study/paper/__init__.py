"""The paper's experiments: Shyam et al., "Tree Attention", arXiv 2408.04093v4.

Each is one module: a model of the paper's setting, what is measured of a small one. docs/paper.md explains.
"""

from __future__ import annotations

from treeattn.study.paper import bandwidth, latency, llama, memory, steps, volume
from treeattn.study.paper.experiment import Cell, Experiment, Table, shown

__all__ = ["EXPERIMENTS", "Cell", "Experiment", "Table", "shown"]

#: Name, which is that of its module, -> experiment, in the order of the paper.
EXPERIMENTS: dict[str, Experiment] = {
    module.__name__.rpartition(".")[2]: module.EXPERIMENT
    for module in (steps, bandwidth, latency, memory, volume, llama)
}
