"""Linear maps of a layer: whole on a rank, or in parts over ranks (tensor parallel).

A rank holds some rows of a map (`Gathered`: it makes some of the outputs, which come together) or some
columns (`Reduced`: it takes some of the inputs, and what ranks make is added). That is right where all ranks
have the same tokens. Where each has its own, as in a prefill, `whole` brings the parts together for as long
as they are needed: it costs the weights once, however long the prompt is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treeattn.decoder.device import Device
from treeattn.llama.ranks import Axis, Ranks

__all__ = ["Gathered", "Linear", "Reduced", "Rows", "Stacked"]


class Linear:
    """x [tokens, in] -> x @ weight.T + bias [tokens, out]; weight [out, in], bias [out] or None: float32, of
    the device."""

    def __init__(self, device: Device, weight: Any, bias: Any) -> None:
        self.device, self.weight, self.bias = device, weight, bias
        self._product = device.product(weight)

    def __call__(self, x: Any) -> Any:
        return self._biased(self._product(x))

    def _biased(self, y: Any) -> Any:
        if self.bias is not None:
            y += self.bias
        return y

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
        namespace = self._maps[0].device.namespace
        return namespace.concatenate([one(x) for one in self._maps], axis=1)

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
        super().__init__(ranks.device, weight, bias)
        self._ranks, self._outputs = ranks, outputs

    def whole(self) -> Linear:
        """As `Linear.whole`."""
        return _whole(self._ranks, self.weight, self.bias, self._outputs)


class Gathered(Linear):
    """Several maps of one input, of each this rank's rows: all their outputs side by side, on every rank."""

    def __init__(self, ranks: Ranks, outputs: Sequence[Axis], weight: Any, bias: Any) -> None:
        """outputs: of each map. weight, bias: this rank's rows of the first, then of the second, ..."""
        super().__init__(ranks.device, weight, bias)
        self._ranks, self._outputs = ranks, outputs
        ends = np.cumsum([axis.length for axis in outputs]).tolist()
        places = [  # of what comes together, which is by rank
            np.arange(end - axis.length, end)[axis.part(rank, ranks.size)]
            for rank in range(ranks.size)
            for end, axis in zip(ends, outputs, strict=True)
        ]
        self._order = np.argsort(np.concatenate(places))

    def __call__(self, x: Any) -> Any:
        made = self._ranks.together(super().__call__(x).T, *self._outputs, order=self._order)
        return self.device.from_host(np.ascontiguousarray(made.T))

    def whole(self) -> Linear:
        """As `Linear.whole`."""
        return _whole(self._ranks, self.weight, self.bias, *self._outputs, order=self._order)


class Reduced(Linear):
    """This rank's columns of a map: what it makes of its own inputs, summed over ranks."""

    def __init__(self, ranks: Ranks, inputs: Axis, weight: Any, bias: Any) -> None:
        """bias: whole, on every rank."""
        super().__init__(ranks.device, weight, bias)
        self._ranks, self._inputs, self._own = ranks, inputs, inputs.part(ranks.rank, ranks.size)

    def __call__(self, x: Any) -> Any:
        """x: all inputs, or this rank's alone."""
        mine = x[:, self._own] if x.shape[1] == self._inputs.length else x
        return self._biased(self._ranks.total(self._product(mine)))

    def whole(self) -> Linear:
        """As `Linear.whole`."""
        columns = self.device.from_host(self._ranks.together(self.weight.T, self._inputs))
        return Linear(self.device, columns.T, self.bias)


def _whole(ranks: Ranks, weight: Any, bias: Any, *outputs: Axis, order: Any = None) -> Linear:
    """The map of which every rank holds some rows. Collective."""
    rows = [weight] if bias is None else [weight, bias[:, None]]
    whole = [ranks.device.from_host(ranks.together(one, *outputs, order=order)) for one in rows]
    return Linear(ranks.device, whole[0], None if bias is None else whole[1][:, 0])
