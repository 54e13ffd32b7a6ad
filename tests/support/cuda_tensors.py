"""Tensors of torch that say they lie on a GPU, whose memory the emulator's kernels reach.

A model computes with plain tensors; what it hands to treeattn (the new tokens of `update`, the arguments of
attention and of its mask) is wrapped on the way in and unwrapped on the way back. In between nothing can look
at it from the host: what would copy a real one implicitly, or fail, raises.
"""

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from tests.emulator.device_array import DeviceArray
from tests.emulator.raw_module import compiler_problem
from tests.emulator.runtime import StrictRuntime
from treeattn.attention import arrays
from treeattn.backends.cuda import cupy_runtime
from treeattn.huggingface import ShardedKV
from treeattn.huggingface.attention import attention
from treeattn.huggingface.mask import mask

DEVICE = torch.device("cuda", 0)


def _refused(name: str) -> Any:
    def refuse(self: torch.Tensor, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{name}() of a tensor on a GPU")

    return refuse


class CudaTensor(torch.Tensor):
    """Results of torch's functions are of this class, too."""

    device = DEVICE
    is_cuda = True
    numpy, tolist, item = map(_refused, ("numpy", "tolist", "item"))
    __array__, __int__, __float__ = map(_refused, ("__array__", "__int__", "__float__"))

    def cpu(self) -> torch.Tensor:
        """A copy for the host, which somebody asked for."""
        return self.as_subclass(torch.Tensor).clone()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Of bytes in a row, which a cache takes."""
        assert self.dtype == torch.uint8
        return {"version": 3, "shape": (len(self),), "typestr": "|u1", "data": (self.data_ptr(), False)}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        """A capsule that says the same."""
        assert options.pop("stream") == (torch.cuda.current_stream(DEVICE).cuda_stream or 1)
        capsule = self.as_subclass(torch.Tensor).__dlpack__(**options)
        kind = arrays._capsule_name(capsule)
        at = arrays._capsule_pointer(capsule, kind) + arrays._TENSOR_AT[kind]
        arrays._Tensor.from_address(at).device_type = 2
        return capsule


class _Devices(TorchFunctionMode):
    """What asks for a tensor on `DEVICE` gets one of these; what moves one to the host, a plain one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args[1:], *(kwargs or {}).values()]
        to = next((one for one in given if isinstance(one, torch.device)), None)
        if func is torch.Tensor.to and given and isinstance(given[0], torch.Tensor):
            to = given[0].device
        args = [args[0], *(one for one in args[1:] if not isinstance(one, torch.device))] if args else []
        kwargs = {name: one for name, one in (kwargs or {}).items() if name != "device"}
        result = func(*args, **kwargs)
        if to is None:
            return result
        return on_gpu(result) if to.type == "cuda" else plain(result)


def on_gpu(tensor: Any) -> Any:
    """The same memory, as of a GPU, and the layer that keys carry."""
    return _as(CudaTensor, tensor)


def plain(tensor: Any) -> Any:
    """The same memory, as of the host."""
    return _as(torch.Tensor, tensor)


def _as(kind: type, tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    seen = tensor.as_subclass(kind)
    if hasattr(tensor, "treeattn"):
        seen.treeattn = tensor.treeattn
    return seen


def _wrapped(call: Any, from_gpu: Any) -> Any:
    """`call`, whose tensors lie on a GPU; what it gives back is checked to lie there, too."""

    def wrapped(*given: Any, **named: Any) -> Any:
        with _Devices():
            given = tuple(map(on_gpu, given))
            return from_gpu(call(*given, **{name: on_gpu(one) for name, one in named.items()}))

    return wrapped


def _pair(found: Any) -> Any:
    for one in found:
        assert one is None or type(one) is CudaTensor
    return tuple(map(plain, found))


@functools.cache
def _runtime(rank: int) -> StrictRuntime:
    runtime = StrictRuntime()
    runtime.identity = f"emulated GPU {rank}"
    return runtime


@contextlib.contextmanager
def models_on_gpu(rank: int = 0) -> Iterator[StrictRuntime]:
    """What attends by "treeattn" has its tensors on the emulated GPU of this rank, which is the
    same each time: plans outlive caches."""
    if (problem := compiler_problem()) is not None:
        pytest.skip(problem)
    runtime = _runtime(rank)
    from_dlpack, empty, update = torch.from_dlpack, torch.empty, ShardedKV.update

    def taken(array: Any) -> torch.Tensor:
        if isinstance(array, DeviceArray):
            return on_gpu(torch.from_numpy(array._inside))
        return from_dlpack(array)

    def in_torchs_pool(*size: Any, **named: Any) -> torch.Tensor:
        device = torch.device(named.pop("device", None) or "cpu")
        return empty(*size, **named) if device.type == "cpu" else on_gpu(empty(*size, **named))

    with contextlib.ExitStack() as stack:
        for owner, name, one in (
            (cupy_runtime, "current", lambda: runtime),
            (arrays, "_is_plain", lambda one: type(one) in (torch.Tensor, CudaTensor)),
            (torch, "from_dlpack", taken),
            (torch, "empty", in_torchs_pool),
            (torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0)),
            (torch.cuda, "Event", lambda: SimpleNamespace(record=bool, query=lambda: True)),
            (ShardedKV, "update", _wrapped(update, _pair)),
        ):
            stack.enter_context(mock.patch.object(owner, name, one))
        AttentionInterface.register("treeattn", _wrapped(attention, _pair))
        stack.callback(AttentionInterface.register, "treeattn", attention)
        AttentionMaskInterface.register("treeattn", _wrapped(mask, lambda made: made))
        stack.callback(AttentionMaskInterface.register, "treeattn", mask)
        yield runtime
