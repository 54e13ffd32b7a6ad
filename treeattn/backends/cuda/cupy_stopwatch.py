"""Timing on an NVIDIA GPU through CuPy: CUDA events, and what the device says of itself."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda import driver as cuda_driver

# Name in the results -> what nvidia-smi calls it. MHz, W, degrees Celsius.
_READINGS = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "max_sm_clock_mhz": "clocks.max.sm",
    "max_memory_clock_mhz": "clocks.max.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


class CupyStopwatch:
    """Times what is queued on CuPy's current device. Raises `BackendError` without CuPy, driver or GPU."""

    def __init__(self) -> None:
        """Time on the device that is current now."""
        #: The device, for the kernels.
        self.runtime = cupy_runtime.current()
        import cupy

        self._cupy = cupy
        self._device = cupy.cuda.Device()
        #: Size of the L2 cache.
        self.l2_bytes = int(self._device.attributes["L2CacheSize"])
        # Not "non-blocking": arrays are made on the default stream, and work here has to wait for that.
        self._stream = cupy.cuda.Stream()

    def laps(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """Seconds on the device between CUDA events around each run."""
        events = [self._cupy.cuda.Event() for _ in range(len(runs) + 1)]
        with self._stream as stream:
            stream.synchronize()
            events[0].record(stream)
            for run, event in zip(runs, events[1:], strict=True):
                run()
                event.record(stream)
            events[-1].synchronize()
        elapsed = self._cupy.cuda.get_elapsed_time
        return [elapsed(*pair) / 1e3 for pair in itertools.pairwise(events)]

    def host_seconds(self, run: Callable[[], object], calls: int) -> float:
        """Seconds of the host for one call, the device not waited for."""
        with self._stream as stream:
            run()
            stream.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                run()
            taken = time.perf_counter() - began
            stream.synchronize()
        return taken / calls

    def facts(self) -> dict[str, Any]:
        """Device, driver, CUDA, and what nvidia-smi reads now, or None where it cannot be asked."""
        cuda = self._cupy.cuda
        driver = cuda_driver.driver()
        properties = cuda.runtime.getDeviceProperties(self._device.id)
        return {
            "name": properties["name"].decode(),
            "compute_capability": f"{properties['major']}.{properties['minor']}",
            "multiprocessors": self.runtime.multiprocessors,
            "memory_bytes": int(properties["totalGlobalMem"]),
            "l2_bytes": self.l2_bytes,
            "driver": driver.release if driver else None,
            "driver_cuda": cuda.runtime.driverGetVersion(),
            "cuda_runtime": cuda.runtime.runtimeGetVersion(),
            "nvrtc": ".".join(map(str, cuda.nvrtc.getVersion())),
            "cupy": self._cupy.__version__,
            "readings": _readings(self._device.pci_bus_id),
        }


def _readings(bus: str) -> dict[str, float | str] | None:
    """Clocks and power of the GPU at a PCI address, by nvidia-smi."""
    command = ["nvidia-smi", "-i", bus, "--format=csv,noheader,nounits"]
    command.append(f"--query-gpu={','.join(_READINGS.values())}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return {
        name: _number(text.strip()) for name, text in zip(_READINGS, done.stdout.split(","), strict=False)
    }


def _number(text: str) -> float | str:
    """A reading, or the words that stand for one that there is not, such as "[N/A]"."""
    try:
        return float(text)
    except ValueError:
        return text
