"""A `treeattn.study.roofline.laps.CupyStopwatch` over the emulator; its clock counts work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .runtime import EmulatorRuntime

__all__ = ["COPIED_PER_SECOND", "SECONDS_PER_LAUNCH", "EmulatorStopwatch", "TimedRuntime"]

COPIED_PER_SECOND = 1e12  # bytes, each once
SECONDS_PER_LAUNCH = 5e-6


class TimedRuntime(EmulatorRuntime):
    """Has a clock. What is recorded counts when it is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def kernel(self, module: str, expression: str, shared_bytes: int = 0) -> Callable[..., object]:
        """As of the emulator."""
        kernel = super().kernel(module, expression, shared_bytes)

        def launch(grid: Any, block: Any, arguments: Any, **options: Any) -> None:
            kernel(grid, block, arguments, **options)
            self._take(SECONDS_PER_LAUNCH)

        return launch

    def copy(self, into: Any, source: Any) -> None:
        """As of the emulator."""
        super().copy(into, source)
        self._take(source.nbytes / COPIED_PER_SECOND)

    def _take(self, seconds: float) -> None:
        def pass_by() -> None:
            self.seconds += seconds

        self.queue(pass_by)


class EmulatorStopwatch:
    """A device with a small L2 cache, on which a launch takes 5 microseconds and a copy 1e12 bytes/s."""

    def __init__(self, l2_bytes: int) -> None:
        self.runtime = TimedRuntime()
        self.l2_bytes = l2_bytes

    def laps(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """By the clock that counts work."""
        times = [self.runtime.seconds]
        for run in runs:
            run()
            times.append(self.runtime.seconds)
        return [float(lap) for lap in np.diff(times)]

    def host_seconds(self, run: Callable[[], object], calls: int) -> float:
        """3 microseconds, after running once."""
        run()
        return 3e-6
