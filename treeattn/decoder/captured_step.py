"""A step of a decoder as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treeattn.collectives.runtime.cuda_graph import CudaGraph
from treeattn.errors import ArgumentError, StateError

__all__ = ["CapturedStep"]


class CapturedStep:
    """What `Decoder.capture` makes."""

    def __init__(
        self,
        captured: CudaGraph,
        give: Callable[[], tuple[Any, Any]],
        owners: tuple[Any, ...],
        look: Callable[..., None] | None,
    ) -> None:
        self._captured, self._give, self._look = captured, give, look
        self._owners = owners  # of the memory that the graph works on: it knows addresses only
        captured()
        captured.record()

    def __call__(
        self,
        lengths: Any = None,
        *,
        q_positions: Any = None,
        positions: Any = None,
        mask: Any = None,
        draft_positions: Any = None,
        begins: Any = None,
    ) -> tuple[Any, Any]:
        """One launch: (out, lse), valid until the decoder's next step.

        Of a step that was captured with rules, a mask or begins: lengths, q_positions, positions, mask,
        draft_positions and begins as for a call of the decoder; those left out are the arrays of the
        capture, as they are now. What changed is copied to the GPU before the launch, which keeps the number
        of splits that the capture had: capture with about as many visible tokens as are to come. Raises
        `ArgumentError`.
        """
        if not self._owners:
            raise StateError("the decoder of this captured step is closed")
        given = lengths, q_positions, positions, mask, draft_positions, begins
        if self._look is not None:
            self._look(*given)
        elif any(one is not None for one in given):
            raise ArgumentError(
                "this step was captured without rules, mask or begins: it sees all, by the lengths in the "
                "array of the capture; pass what queries see to capture(), and change lengths in place"
            )
        self._captured()
        return self._give()

    def drop(self) -> None:
        """Give the graph back."""
        self._captured.drop()
        self._owners = ()
