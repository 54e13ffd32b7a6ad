"""The paper's experiments: Shyam et al., "Tree Attention", arXiv 2408.04093v4.

Each is one module: a model of the paper's setting, and what is measured of a small one. What they show, and
what they do not explain, stands in docs/paper.md.
"""

from __future__ import annotations

from treeattn.study.paper import bandwidth, latency, llama, memory, steps, volume
from treeattn.study.paper.experiment import NO_SIMULATOR, Cell, Experiment, Table, shown

__all__ = ["EXPERIMENTS", "NO_SIMULATOR", "Cell", "Experiment", "Table", "shown"]

#: Name -> experiment, in the order of the paper.
EXPERIMENTS: dict[str, Experiment] = {
    "steps": steps.EXPERIMENT,
    "bandwidth": bandwidth.EXPERIMENT,
    "latency": latency.EXPERIMENT,
    "memory": memory.EXPERIMENT,
    "volume": volume.EXPERIMENT,
    "llama": llama.EXPERIMENT,
}
