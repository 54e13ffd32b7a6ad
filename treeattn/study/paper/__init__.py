"""The paper's experiments: Shyam et al., "Tree Attention", arXiv 2408.04093v4.

Each is one module. TITLE; WHERE: its place in the paper; model(**PAPER): what the paper's equations and the
simulator say of its setting. `treeattn compare` measures times, tests/mpi/test_laws.py what ranks hold and
send. docs/paper.md explains.
"""

from __future__ import annotations

from types import ModuleType

from treeattn.study.paper import latency, llama, memory, steps, volume
from treeattn.study.paper.experiment import Table, shown

__all__ = ["EXPERIMENTS", "Table", "shown"]

#: Name, which is that of its module, -> experiment, in the order of the paper.
EXPERIMENTS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module for module in (steps, latency, memory, volume, llama)
}
