"""How arrays of a model's ranks come together: by MPI, those of a GPU by way of the host.

What travels here are hidden states and, for a prefill, weights that are sharded. Records of attention take
the transport that a session names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treeattn.collectives import waiting
from treeattn.decoder.device import Device
from treeattn.shards import block

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Axis", "Ranks"]


class Axis(NamedTuple):
    """Heads, rows or columns that are dealt out to ranks in balanced blocks (heads as by a decoder with
    ``output="heads"``); a head is `unit` rows."""

    blocks: int
    unit: int = 1

    @property
    def length(self) -> int:
        """Rows of all ranks."""
        return self.blocks * self.unit

    def part(self, rank: int, size: int) -> slice:
        """The rows of a rank."""
        heads = block(self.blocks, rank, size)
        return slice(heads.start * self.unit, heads.stop * self.unit)


class Ranks:
    """Those that hold a model's weights in parts, on devices of one kind, and what they bring together, each
    wait within its limit."""

    def __init__(self, comm: Intracomm, device: Device) -> None:
        self.comm, self.rank, self.size, self.device = comm, comm.rank, comm.size, device
        self.waits = waiting.Waits("the model's sharded weights")

    def together(self, rows: Any, *axes: Axis, order: Any = None) -> Any:
        """The rows of all ranks [length of all axes, columns], ordered by rank or as `order` says, from those
        of each: an array of the host."""
        whole = np.empty((sum(axis.length for axis in axes), rows.shape[1]), np.float32)
        parts = [[axis.part(rank, self.size) for axis in axes] for rank in range(self.size)]
        counts = [sum(part.stop - part.start for part in own) * rows.shape[1] for own in parts]
        mine = self.on_host(rows)
        with self.waits:
            self.comm.Allgatherv(mine, (whole, counts))
        return whole if order is None else whole[order]

    def total(self, part: Any) -> Any:
        """The sum of what all ranks have, a new array."""
        mine = self.on_host(part)
        whole = np.empty_like(mine)
        with self.waits:
            self.comm.Allreduce(mine, whole)
        return self.device.from_host(whole)

    def on_host(self, array: Any) -> Any:
        """An array of the device as MPI reads it: C-contiguous, the array itself where it is."""
        return np.ascontiguousarray(self.device.readable(array))
