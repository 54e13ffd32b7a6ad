"""Linear maps of a layer: whole on a rank, or in parts over ranks (tensor parallel).

A rank holds some rows of a map (`Gathered`: it makes some of the outputs, which come together) or some
columns (`Reduced`: it takes some of the inputs, and what ranks make is added). That is right where all ranks
have the same tokens. Where each has its own, as in a prefill, `whole` brings the parts together for as long
as they are needed: it costs the weights once, however long the prompt is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treeattn.backends.cpu import PlannedProduct
from treeattn.collectives import waiting
from treeattn.shards import block

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Axis", "Gathered", "Linear", "Ranks", "Reduced", "Rows", "Stacked"]


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
    """Those that hold a model's weights in parts, and what they bring together; each wait has its limit."""

    def __init__(self, comm: Intracomm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.waits = waiting.Waits("the model's sharded weights")

    def together(self, rows: Any, *axes: Axis) -> Any:
        """The rows of all ranks [length of all axes, columns], ordered by rank, from those of each."""
        whole = np.empty((sum(axis.length for axis in axes), rows.shape[1]), np.float32)
        parts = [[axis.part(rank, self.size) for axis in axes] for rank in range(self.size)]
        counts = [sum(part.stop - part.start for part in own) * rows.shape[1] for own in parts]
        with self.waits:
            self.comm.Allgatherv(np.ascontiguousarray(rows), (whole, counts))
        return whole

    def total(self, part: Any) -> Any:
        """The sum of what all ranks have, a new array."""
        whole = np.empty_like(part)
        with self.waits:
            self.comm.Allreduce(part, whole)
        return whole


class Linear:
    """x [tokens, in] -> x @ weight.T + bias [tokens, out]; weight [out, in], bias [out] or None."""

    def __init__(self, weight: Any, bias: Any) -> None:
        self.weight, self.bias = weight, bias
        self._product = PlannedProduct(weight)

    def __call__(self, x: Any) -> Any:
        y = self._product(x)
        return y if self.bias is None else np.add(y, self.bias, out=y)

    def whole(self) -> Linear:
        """The map that takes and gives everything. Collective where it is in parts."""
        return self

    @property
    def arrays(self) -> list[Any]:
        """What this rank holds."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class Stacked:
    """Several maps of one input, whole: their outputs side by side."""

    def __init__(self, maps: Sequence[Linear]) -> None:
        self._maps = maps

    def __call__(self, x: Any) -> Any:
        return np.concatenate([one(x) for one in self._maps], axis=1)

    def whole(self) -> Stacked:
        """As `Linear.whole`."""
        return self

    @property
    def arrays(self) -> list[Any]:
        """What this rank holds."""
        return [array for one in self._maps for array in one.arrays]


class Rows(Linear):
    """This rank's rows of a map: it makes its own part of the outputs."""

    def __init__(self, ranks: Ranks, outputs: Axis, weight: Any, bias: Any) -> None:
        super().__init__(weight, bias)
        self._ranks, self._outputs = ranks, outputs

    def whole(self) -> Linear:
        """As `Linear.whole`."""
        bias = None if self.bias is None else self._ranks.together(self.bias[:, None], self._outputs)[:, 0]
        return Linear(self._ranks.together(self.weight, self._outputs), bias)


class Gathered(Linear):
    """Several maps of one input, of each this rank's rows: all their outputs side by side, on every rank."""

    def __init__(self, ranks: Ranks, outputs: Sequence[Axis], weight: Any, bias: Any) -> None:
        """outputs: of each map. weight, bias: this rank's rows of the first, then of the second, ..."""
        super().__init__(weight, bias)
        self._ranks, self._outputs = ranks, outputs
        ends = np.cumsum([axis.length for axis in outputs]).tolist()
        places = [  # of what comes together, which is by rank
            np.arange(end - axis.length, end)[axis.part(rank, ranks.size)]
            for rank in range(ranks.size)
            for end, axis in zip(ends, outputs, strict=True)
        ]
        self._order = np.argsort(np.concatenate(places))

    def __call__(self, x: Any) -> Any:
        made = self._ranks.together(super().__call__(x).T, *self._outputs)
        return np.ascontiguousarray(made[self._order].T)

    def whole(self) -> Linear:
        """As `Linear.whole`."""
        rows = [self.weight] if self.bias is None else [self.weight, self.bias[:, None]]
        weight, *bias = (self._ranks.together(one, *self._outputs)[self._order] for one in rows)
        return Linear(weight, bias[0][:, 0] if bias else None)


class Reduced(Linear):
    """This rank's columns of a map: what it makes of its own inputs, summed over ranks."""

    def __init__(self, ranks: Ranks, inputs: Axis, weight: Any, bias: Any) -> None:
        """bias: whole, on every rank."""
        super().__init__(weight, bias)
        self._ranks, self._inputs, self._own = ranks, inputs, inputs.part(ranks.rank, ranks.size)

    def __call__(self, x: Any) -> Any:
        """x: all inputs, or this rank's alone."""
        mine = x[:, self._own] if x.shape[1] == self._inputs.length else x
        y = self._ranks.total(np.ascontiguousarray(self._product(mine)))
        return y if self.bias is None else np.add(y, self.bias, out=y)

    def whole(self) -> Linear:
        """As `Linear.whole`."""
        return Linear(self._ranks.together(self.weight.T, self._inputs).T, self.bias)
