"""Arrays of any library, taken as they are and given back in kind.

An array is taken if it has DLPack (``__dlpack__``: torch, JAX, CuPy and others), the CUDA array interface or
the array interface: its memory is looked at in place, never copied, moved or written. Nothing of those
libraries is imported. bfloat16, which NumPy's own reader of DLPack refuses, is read here as its bits.

Sources: the DLPack specification, C API of version 1 (dmlc.github.io/dlpack/latest/c_api.html); NumPy's array
interface, version 3; Numba's CUDA array interface, version 3.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, Protocol, cast

import ml_dtypes
import numpy as np

from treeattn.errors import ArgumentError
from treeattn.partial import Array

Pair = tuple[Array, Array]


class AnyArray(Protocol):
    """An array of any library: NumPy's, CuPy's, torch's, JAX's."""

    @property
    def shape(self) -> Any:
        """A tuple of integers, or what is used as one."""

    @property
    def dtype(self) -> Any:
        """An object of the library's own."""


# DLDeviceType: what the processor reads in place (memory of the host, pinned or not), and what a GPU does.
_HOST, _GPU = (1, 3), (2, 13)
# DLDataTypeCode, as the array interface calls it. A bfloat16 goes by its bits.
_KINDS = {0: "i", 1: "u", 2: "f", 4: "u"}
_BFLOAT = 4
# torch's types, as the CUDA array interface calls them.
_TORCH_TYPES = {
    "torch.float32": "<f4", "torch.float16": "<f2", "torch.bfloat16": "<u2", "torch.uint8": "|u1",
    "torch.int64": "<i8",
}  # fmt: skip


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_uint64),
        ("strides", ctypes.c_uint64),
        ("byte_offset", ctypes.c_uint64),
    )


# Before the tensor DLManagedTensorVersioned has version, owner, deleter and flags, DLManagedTensor nothing.
_TENSOR_AT = {b"dltensor": 0, b"dltensor_versioned": 32}

_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_uint64, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Exported:
    """Memory of another library under the name that NumPy or CuPy looks for; holds what owns it.

    A capsule of DLPack that nobody consumed gives its memory back when it is dropped.
    """

    def __init__(self, protocol: str, interface: dict[str, Any], owner: object) -> None:
        setattr(self, protocol, interface)
        self._owner = owner


def device_of(name: str, array: object) -> str:
    """Where an array lies: ``"cpu"`` or ``"cuda"``. Raises `ArgumentError` for what is no array."""
    if isinstance(array, np.ndarray):
        return "cpu"
    if hasattr(array, "__dlpack_device__"):
        return _device_name(name, int(_asked(name, array.__dlpack_device__)[0]))
    if hasattr(array, "__cuda_array_interface__"):
        return "cuda"
    if hasattr(array, "__array_interface__"):
        return "cpu"
    raise _no_array(name, array)


def lies_on_gpu(name: str, given: Any, runtime: Any) -> bool:
    """Whether what a call was given, perhaps no array at all, is one of a GPU."""
    if runtime.holds(given):
        return True
    array = hasattr(given, "__dlpack_device__") or hasattr(given, "__cuda_array_interface__")
    return array and device_of(name, given) == "cuda"


def on_host(name: str, array: object) -> Array:
    """An array in the memory of the host as a NumPy array over the same memory.

    What is no NumPy array already is read-only; bfloat16 is that of ml_dtypes. Raises `ArgumentError` for
    what is no array, or lies elsewhere.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(
            f"{name} is a masked array, of which the mask would be lost: pass {name}.filled(..)"
        )
    if isinstance(array, np.ndarray):
        return array
    if (view := _torch_view(array)) is not None:
        return view
    if hasattr(array, "__dlpack__"):
        return _view(name, array, "cpu", "__array_interface__", np.asarray)
    if not hasattr(array, "__cuda_array_interface__") and hasattr(array, "__array_interface__"):
        return np.asarray(array)
    raise _elsewhere(name, array, "cpu")


def on_gpu(name: str, array: Any, runtime: Any) -> Any:
    """An array of a GPU as one of `runtime` (a `treeattn.backends.cuda.Runtime`) over the same memory.

    The exporter is told the runtime's stream, so that its pending work on the array comes first. Raises
    `ArgumentError` for what is no array, or lies elsewhere.
    """
    if runtime.holds(array):
        return array
    if (view := _torch_view_on_gpu(array, runtime)) is not None:
        return view
    if device_of(name, array) != "cuda":
        raise _elsewhere(name, array, "cuda")
    if not hasattr(array, "__dlpack__"):
        borrowed: Array = runtime.borrow(array)
        return borrowed
    stream = runtime.stream or 1  # DLPack's number of the default stream
    return _view(name, array, "cuda", "__cuda_array_interface__", runtime.borrow, stream=stream)


def _view(
    name: str, array: Any, device: str, protocol: str, borrow: Callable[[Any], Array], **stream: Any
) -> Array:
    """What `borrow` makes of the memory that a DLPack exporter hands out."""
    capsule = _asked(name, _capsule, array, **stream)
    kind = _capsule_name(capsule)
    tensor = _Tensor.from_address(_capsule_pointer(capsule, kind) + _TENSOR_AT[kind])
    if _device_name(name, tensor.device_type) != device:
        raise _elsewhere(name, array, device)
    itemsize = tensor.bits // 8
    if tensor.code not in _KINDS or tensor.bits % 8 or tensor.lanes != 1:
        raise ArgumentError(
            f"{name} has elements of a type that is not supported (DLPack type code {tensor.code}, "
            f"{tensor.bits} bits): use float32, float16, bfloat16 or float64"
        )
    extents = ctypes.c_int64 * tensor.ndim
    strides = extents.from_address(tensor.strides) if tensor.strides else None
    interface = {
        "version": 3,
        "shape": tuple(extents.from_address(tensor.shape)) if tensor.ndim else (),
        "strides": None if strides is None else tuple(stride * itemsize for stride in strides),
        "typestr": f"{'<' if itemsize > 1 else '|'}{_KINDS[tensor.code]}{itemsize}",
        "data": (tensor.data + tensor.byte_offset, True),
    }
    taken = borrow(_Exported(protocol, interface, capsule))
    return taken.view(ml_dtypes.bfloat16) if tensor.code == _BFLOAT and itemsize == 2 else taken


def _torch_view(array: Any) -> Array | None:
    """A plain tensor of torch on the host, by its own way to NumPy, which takes an eighth of DLPack's time;
    None for all else, of which DLPack tells what is wrong with it."""
    torch = sys.modules.get("torch")
    if torch is None or not _is_plain(array) or array.requires_grad:
        return None
    try:
        if array.dtype is torch.bfloat16:
            view: Array = array.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        elif array.dtype in (torch.float32, torch.float16, torch.float64):
            view = array.numpy()
        else:
            return None
    except (RuntimeError, TypeError):  # not of the host, or not in rows
        return None
    view.flags.writeable = False
    return view


def _torch_view_on_gpu(array: Any, runtime: Any) -> Any:
    """A plain tensor of torch by its pointer, where torch computes on the runtime's stream: nothing is waited
    for then. None for all else, which goes by DLPack."""
    torch = sys.modules.get("torch")
    if torch is None or not _is_plain(array) or array.requires_grad or array.is_neg():
        return None
    kind, size = _TORCH_TYPES.get(str(array.dtype)), array.element_size()
    if kind is None or array.device.type != "cuda":
        return None
    if torch.cuda.current_stream(array.device).cuda_stream != runtime.stream:
        return None
    try:
        interface = {
            "version": 3,
            "shape": tuple(array.shape),
            "strides": tuple([stride * size for stride in array.stride()]),
            "typestr": kind,
            "data": (array.data_ptr(), True),
        }
    except RuntimeError:  # not in rows
        return None
    view = runtime.borrow(_Exported("__cuda_array_interface__", interface, array))
    return view.view(ml_dtypes.bfloat16) if array.dtype is torch.bfloat16 else view


def _is_plain(array: object) -> bool:
    """Whether it is a tensor of torch with memory of its own: one of a class made of it may lie anywhere."""
    torch = sys.modules["torch"]
    return type(array) is torch.Tensor and not torch._is_functional_tensor(array)


def _capsule(array: Any, **stream: Any) -> Any:
    """A capsule of version 1 where the exporter knows it: older ones cannot say that memory is read-only."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor) and torch._is_functional_tensor(array):
        raise ValueError("it is traced by torch.func, and has no memory")
    if getattr(array, "is_neg", bool)():  # torch's DLPack does not say it
        raise ValueError("its negative bit is set: pass resolve_neg() of it")
    try:
        return array.__dlpack__(max_version=(1, 0), **stream)
    except TypeError:
        return array.__dlpack__(**stream)


def _asked(name: str, ask: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """What another library answers; what it refuses is the caller's to mend, in the library's words."""
    try:
        return ask(*given, **options)
    except Exception as error:  # each library has types of its own
        raise ArgumentError(f"{name} cannot be taken as it is: {error}") from error


def _device_name(name: str, kind: int) -> str:
    if kind in _HOST:
        return "cpu"
    if kind in _GPU:
        return "cuda"
    raise ArgumentError(
        f"{name} lies on a device of DLPack type {kind}: move it to the host or to a CUDA GPU"
    )


def _no_array(name: str, given: object) -> ArgumentError:
    kind = f"{type(given).__module__}.{type(given).__name__}".removeprefix("builtins.")
    return ArgumentError(
        f"{name} is a {kind}: pass an array with DLPack or the array interface, as NumPy, CuPy, torch and "
        "JAX have (numpy.asarray makes one)"
    )


def _elsewhere(name: str, array: object, wanted: str) -> ArgumentError:
    """Why an array that does not lie on `wanted` is refused. May raise, too, for what is no array."""
    where = device_of(name, array)
    if where == wanted:
        return _no_array(name, array)
    places = {"cpu": "in the memory of the host", "cuda": "on a GPU"}
    return ArgumentError(
        f"{name} lies {places[where]}, but the step computes with device={wanted!r}: move the array, or say "
        f"device={where!r}"
    )


def give(results: Pair, like: object) -> Pair:
    """Results, as NumPy or CuPy arrays, in the container of `like`.

    torch tensors share their memory. Those of a library with a namespace of the array API, such as JAX, are
    copies: such arrays may be immutable. Anything else gets the results as they are, and so does a rank that
    is given none.
    """
    shared = _shared(results, like)
    return _copies(results, like) if shared is None else shared


def in_kind(result: Array, like: object) -> Array:
    """One result as `give` gives two."""
    return give((result, result), like)[0]


def _shared(results: Pair, like: object) -> Pair | None:
    """None where a container has to be given copies."""
    first: Array | None = results[0]
    if first is None:
        return results
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.from_dlpack(results[0]), torch.from_dlpack(results[1])
    native = isinstance(like, np.ndarray | type(results[0]))
    return results if native or not hasattr(like, "__array_namespace__") else None


def _copies(results: Pair, like: Any) -> Pair:
    """The copy is made here: one asked of the library may be made later than it answers (JAX)."""
    take = like.__array_namespace__().from_dlpack
    return take(results[0].copy()), take(results[1].copy())


class Containers:
    """What a caller's arrays are to the steps of a plan, and the plan's results to the caller.

    Arrays of the last step, the same objects over the same memory, are not looked at again.
    """

    def __init__(self, view: Callable[[str, object], Array], results: Pair, given: bool = True) -> None:
        """view: called with a name and an array, gives one of the device. results: (out, lse) there; given:
        whether this rank's caller gets them, not (None, None)."""
        self._view, self.results = view, results if given else cast(Pair, (None, None))
        self._native = type(results[0])
        self._seen: dict[str, tuple[object, object, Array]] = {}
        self._like: object = None
        self._shared: tuple[type, Pair | None] = (self._native, self.results)

    def take(self, *arrays: Any, names: tuple[str, ...] = ("q", "k", "v")) -> tuple[Array, ...]:
        """The arrays of a step as the device's; results will be of the kind of the first.

        Raises `ArgumentError`.
        """
        self._like = arrays[0]
        native = self._native
        for array in arrays:
            if type(array) is not native:
                return tuple(map(self._taken, names, arrays))
        return arrays

    def _taken(self, name: str, array: Any) -> Array:
        if type(array) is self._native:
            return array
        place = _place(array)
        seen = self._seen.get(name)
        if seen is not None and seen[0] is array and seen[1] == place:
            return seen[2]
        view = self._view(name, array)
        self._seen[name] = (array, place, view)
        return view

    def give(self) -> Pair:
        """(out, lse) in the container of the last step's first array, until the next step."""
        like = self._like
        if type(like) is not self._shared[0]:
            self._shared = type(like), _shared(self.results, like)
        results = self._shared[1]
        return _copies(self.results, like) if results is None else results


_IMMUTABLE = ("jax", "jaxlib")


def _place(array: object) -> object:
    """What may change of an object that stays the same: it can be given other memory, as a growing cache is.

    Who does not say where its memory lies is asked anew in each step: equal to nothing.
    """
    if hasattr(array, "data_ptr"):
        tensor: Any = array
        return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()
    if type(array).__module__.partition(".")[0] in _IMMUTABLE:
        return None
    for protocol in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(array, protocol, None)
        if interface is not None:
            return [interface.get(name) for name in ("data", "shape", "strides", "typestr")]
    return object()
