"""Arrays of made-up libraries: no more than the one protocol by which they hand out their memory."""

from typing import Any

import numpy as np

from treeattn.attention import arrays


class Dlpack:
    """DLPack alone. `kind` and `code` stand in the capsule for a device and an element type NumPy lacks."""

    def __init__(self, array: Any, kind: int = 1, code: int | None = None) -> None:
        self.array, self.kind, self.code, self.asked = array, kind, code, []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> Any:
        self.asked.append(stream)
        capsule = self.array.__dlpack__(max_version=max_version)
        name = arrays._capsule_name(capsule)
        tensor = arrays._Tensor.from_address(arrays._capsule_pointer(capsule, name) + arrays._TENSOR_AT[name])
        tensor.device_type = self.kind
        if self.code is not None:
            tensor.code = self.code
        return capsule


class Old(Dlpack):
    """Before DLPack had versions."""

    def __dlpack__(self, stream: int | None = None) -> Any:  # type: ignore[override]
        return super().__dlpack__(stream=stream)


class Interface:
    """The array interface alone."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__


class OnGpu:
    """The CUDA array interface alone, over memory that the emulator takes for a GPU's."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.__cuda_array_interface__ = {**array.__array_interface__, "version": 3}


def bfloat16_bits(array: Any) -> Any:
    """float32 values as the bits of bfloat16, rounded towards zero."""
    return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
