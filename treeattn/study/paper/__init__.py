"""The paper's experiments: Shyam et al., "Tree Attention", arXiv 2408.04093v4.

Each has the paper's setting and numbers, a model of them, and a small setting that runs for real. Large
settings wait for a simulator: `NO_SIMULATOR` stands in their place.
"""

from __future__ import annotations

from treeattn.study.paper.bandwidth import Bandwidth
from treeattn.study.paper.experiment import NO_SIMULATOR, Cell, Claim, Experiment, Table, shown
from treeattn.study.paper.latency import Latency
from treeattn.study.paper.llama import Llama
from treeattn.study.paper.memory import Memory
from treeattn.study.paper.steps import Steps
from treeattn.study.paper.volume import Volume

__all__ = ["EXPERIMENTS", "NO_SIMULATOR", "Cell", "Claim", "Experiment", "Table", "shown"]

#: Name -> experiment, in the order of the paper.
EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (Steps(), Bandwidth(), Latency(), Memory(), Volume(), Llama())
}
