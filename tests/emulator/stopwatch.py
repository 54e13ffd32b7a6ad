"""A `treeattn.study.roofline.cuda.Stopwatch` over the emulator; its clock counts work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .runtime import EmulatorRuntime

__all__ = ["COPIED_PER_SECOND", "SECONDS_PER_LAUNCH", "EmulatorStopwatch", "RecordingRuntime"]

COPIED_PER_SECOND = 1e12  # bytes, each once
SECONDS_PER_LAUNCH = 5e-6


class RecordingRuntime(EmulatorRuntime):
    """Remembers where the keys of each attention launch lay."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[int] = []

    def kernel(self, module: str, expression: str, shared_bytes: int = 0) -> Callable[..., object]:
        """As of the emulator."""
        kernel = super().kernel(module, expression, shared_bytes)

        def launch(grid: Any, block: Any, arguments: Any, **options: Any) -> None:
            if "k" in (arguments[0].dtype.names or ()):
                self.keys.append(int(arguments[0]["k"][0]))
            kernel(grid, block, arguments, **options)

        return launch


class EmulatorStopwatch:
    """A device with a small L2 cache, on which a launch takes 5 microseconds and a copy 1e12 bytes/s."""

    def __init__(self, l2_bytes: int) -> None:
        self.runtime = RecordingRuntime()
        self.l2_bytes = l2_bytes
        self.graphs = 0
        self._copied = 0

    def upload(self, array: Any) -> Any:
        """A copy."""
        return array.copy()

    def copy(self, into: Any, source: Any) -> None:
        """At once."""
        assert into.nbytes == source.nbytes
        np.copyto(into, source)
        self._copied += source.nbytes

    def captured(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        """Run once; later each launch runs all."""
        kept = list(calls)
        for call in kept:
            call()

        def launch() -> None:
            self.graphs += 1
            for call in kept:
                call()

        return launch

    def laps(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """By the clock that counts work."""
        times = [self._now()]
        for run in runs:
            run()
            times.append(self._now())
        return [float(lap) for lap in np.diff(times)]

    def host_seconds(self, run: Callable[[], object], calls: int) -> float:
        """3 microseconds, after running once."""
        run()
        return 3e-6

    def facts(self) -> dict[str, Any]:
        """A name."""
        return {"name": "emulator", "driver": "none"}

    def _now(self) -> float:
        return self._copied / COPIED_PER_SECOND + self.runtime.launches * SECONDS_PER_LAUNCH
