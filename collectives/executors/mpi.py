"""Runs one schedule on one MPI communicator round by round from Python: nothing but messages and merges.

A planned reducer owns a private duplicate of the communicator, room for what it receives, and persistent
requests: a step starts them round by round and allocates nothing. The memory of a GPU needs an MPI library
that takes its addresses.
"""

from __future__ import annotations

from treeattn.collectives.executors import interpreter
from treeattn.collectives.program import Planned
from treeattn.collectives.runtime.mpi_communicator import PersistentRequests
from treeattn.collectives.runtime.reducer import ReductionSpec


class Reducer(interpreter.Reducer):
    """A planned reduction over all ranks of a communicator of MPI."""

    executor = "mpi"

    def _planned_messages(self, spec: ReductionSpec, planned: Planned) -> PersistentRequests:
        return PersistentRequests(spec.comm)
