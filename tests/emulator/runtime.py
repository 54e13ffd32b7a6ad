"""A `treeattn.backends.cuda.Runtime` that executes the CUDA sources on the processor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn.backends.cuda_source import OPTIONS, source
from treeattn.errors import ArgumentError

from .raw_module import Kernel, RawModule

__all__ = ["EmulatorRuntime"]


class EmulatorRuntime:
    """NumPy arrays stand for device arrays. A small device: 3 multiprocessors of 2 blocks each."""

    multiprocessors = 3
    tensor_cores = True

    def __init__(
        self,
        *,
        seed: int = 0,
        sanitizer: str = "",
        options: tuple[str, ...] = (),
        shared_bytes: int = 227 << 10,
        edit: Callable[[str], str] = str,
    ) -> None:
        """`edit` changes a source before it is compiled: how faults are planted."""
        self._seed = seed
        self._sanitizer = sanitizer
        self._options = options
        self._edit = edit
        self.shared_bytes = shared_bytes
        self.launches = 0
        self.allocations = 0

    def kernel(self, module: str, expression: str, shared_bytes: int = 0) -> Callable[..., object]:
        """A kernel of kernels/cuda, compiled by g++ if it never was."""
        kernel = _kernel(self._edit(source(module)), expression, self._options, self._sanitizer)

        def launch(*args: Any, **options: Any) -> None:
            self.launches += 1
            kernel(*args, seed=self._seed, **options)

        return launch

    def resident_blocks(self, kernel: Any, threads: int, shared_bytes: int) -> int:
        """Always 2."""
        return 2

    def zeros(self, size: int, dtype: Any) -> Any:
        """A NumPy array [size] of zeros."""
        self.allocations += 1
        return np.zeros(size, dtype)

    def address(self, array: Any) -> int:
        """Where the array begins."""
        return int(array.ctypes.data)

    def check(self, name: str, array: Any) -> None:
        """ArgumentError unless `array` is a NumPy array."""
        if not isinstance(array, np.ndarray):
            raise ArgumentError(f"{name} is a {type(array).__name__}, not a numpy.ndarray")


@functools.cache
def _kernel(code: str, expression: str, options: tuple[str, ...], sanitizer: str) -> Kernel:
    module = RawModule(
        code, options=(*OPTIONS, *options), name_expressions=(expression,), sanitizer=sanitizer
    )
    return module.get_function(expression)
