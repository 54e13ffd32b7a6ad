"""Memory in large pages: with small ones prefetchers stop every 4 KiB, and matrices are read half as fast."""

from __future__ import annotations

import numpy as np

from treeattn.collectives.runtime.memory import HOST
from treeattn.partial import Array

_PIECE = 64 << 20  # bytes asked for at once: small matrices share pages
_LINE = 64


class LargePages:
    """Where arrays are put one behind the other; they keep the memory alive."""

    def __init__(self) -> None:
        self._rest: Array = np.empty(0, np.uint8)

    def put(self, array: Array) -> Array:
        """A copy of an array, C-contiguous, which begins with a line of memory."""
        if array.nbytes + _LINE > len(self._rest):
            self._rest = HOST.large((max(_PIECE, array.nbytes + _LINE),), np.uint8)
        begin = -self._rest.ctypes.data % _LINE
        end = begin + array.nbytes
        copy = self._rest[begin:end].view(array.dtype).reshape(array.shape)
        copy[...] = array
        self._rest = self._rest[end:]
        return copy
