"""Arrays of any library are read where they lie, and results come back in kind."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.exporters import Dlpack, Interface, Old, OnGpu, bfloat16_bits
from treeattn.attention.arrays import Containers, device_of, give, on_gpu, on_host
from treeattn.errors import ArgumentError

EXPORTERS = (Dlpack, Old, Interface)
RESULTS = (np.zeros((1, 1, 2, 8), np.float32), np.zeros((1, 2, 1), np.float32))


def some(shape: tuple[int, ...] = (2, 3, 4, 8), dtype: Any = np.float32) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int64, np.uint16, np.uint8])
@pytest.mark.parametrize("cut", [np.s_[:], np.s_[:, 1:, :, ::2], np.s_[:, ::-1], np.s_[:, :0]])
def test_memory_is_looked_at_in_place(exporter: Any, dtype: Any, cut: Any) -> None:
    array = (some() * 9).astype(dtype)[cut]
    view = on_host("k", exporter(array))
    assert type(view) is np.ndarray
    assert (view.dtype, view.shape) == (array.dtype, array.shape)
    assert not array.size or view.strides == array.strides
    np.testing.assert_array_equal(view, array)
    array += 1  # seen: it is the same memory
    np.testing.assert_array_equal(view, array)


def test_bfloat16_which_numpy_has_no_word_for() -> None:
    bits = bfloat16_bits(some())
    view = on_host("q", Dlpack(bits, code=4))
    assert view.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(view.view(np.uint16), bits)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_view_keeps_the_memory(exporter: Any) -> None:
    class Memory(np.ndarray):
        """Can be watched."""

    array = some().view(Memory)
    watched, values = weakref.ref(array), array.tolist()
    view = on_host("q", exporter(array))[1:]
    del array
    gc.collect()
    assert watched() is not None
    assert view.tolist() == values[1:]
    del view
    gc.collect()
    assert watched() is None, "the memory is never given back"


class Refuses:
    """As torch does with a tensor that wants a gradient."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")


class Negated(Dlpack):
    """A view of torch that says so of its elements in a bit, and not to DLPack."""

    def is_neg(self) -> bool:
        return True


class Frame:
    """As a dataframe: columns, and a way to make an array of them, by copying."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return some()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (Refuses(), r"q cannot be taken as it is: Can't export.*use tensor.detach\(\)"),
        (Negated(some()), r"q cannot be taken as it is: its negative bit is set: pass resolve_neg\(\)"),
        ([[1.0]], "q is a list: pass an array with DLPack or the array interface, as NumPy"),
        (None, "q is a NoneType: pass an array"),
        (3.5, "q is a float: pass an array"),
        (Frame(), "q is a .*Frame: pass an array"),
        (Dlpack(some(), kind=2), "q lies on a GPU, but .* device='cpu'.*say device='cuda'"),
        (OnGpu(some()), "q lies on a GPU, but .* device='cpu'"),
        (Dlpack(some(), kind=10), "q lies on a device of DLPack type 10: move it"),
        (np.ma.masked_invalid(some()), r"q is a masked array, of which the mask.*pass q\.filled"),
        (Dlpack(some(dtype=np.complex64)), "type that is not supported .*code 5, 64 bits"),
    ],
    ids=lambda case: "" if isinstance(case, str) else type(case).__name__,
)
def test_what_cannot_be_taken_is_named(array: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        on_host("q", array)
    with pytest.raises(ArgumentError, match=message):
        Containers(on_host, RESULTS).take(array)


def test_where_an_array_lies() -> None:
    at = [device_of("q", array) for array in (some(), Dlpack(some()), Dlpack(some(), 3), Interface(some()))]
    assert at == ["cpu"] * 4  # 3: page-locked memory of the host
    assert [device_of("q", array) for array in (Dlpack(some(), 2), Dlpack(some(), 13), OnGpu(some()))] == [
        "cuda"
    ] * 3
    for array in (Dlpack(some()), Interface(some())):
        with pytest.raises(ArgumentError, match="q lies in the memory of the host, but the step"):
            on_gpu("q", array, SimpleNamespace(holds=lambda _: False, borrow=np.asarray, stream=None))


def test_an_array_that_says_where_it_lies_is_not_taken_again() -> None:
    containers = Containers(on_host, RESULTS)
    q, k, v = Interface(some()), Interface(some()), some()
    first = containers.take(q, k, v)
    again = containers.take(q, k, v)
    assert all(map(lambda a, b: a is b, first, again))
    assert first[2] is v


def test_an_object_that_was_given_other_memory_is_asked_again() -> None:
    class Movable(Dlpack):
        """As torch tensors: set_, resize_ and an assignment to .data change what lies behind."""

        def data_ptr(self) -> int:
            return int(self.array.ctypes.data)

        def stride(self) -> tuple[int, ...]:
            return tuple(self.array.strides)

        shape = property(lambda self: self.array.shape)
        dtype = property(lambda self: self.array.dtype)

    containers = Containers(on_host, RESULTS)
    k = Movable(some((1, 4, 1, 8)))
    containers.take(k, k, k)
    for longer in (some((1, 9, 1, 8)), k.array[:, :2]):
        k.array = longer
        assert containers.take(k, k, k)[1].shape == longer.shape
        np.testing.assert_array_equal(containers.take(k, k, k)[0], longer)
    k.array = k.array.view(np.int32)  # other elements in the same place
    assert containers.take(k, k, k)[0].dtype == np.int32


class Immutable(Dlpack):
    """As JAX arrays: whoever imports memory takes for granted that nobody writes it."""

    def __array_namespace__(self) -> type[Immutable]:
        return Immutable

    @staticmethod
    def from_dlpack(array: Any) -> Immutable:
        return Immutable(array)


def test_results_come_back_in_kind() -> None:
    assert give(RESULTS, some()) is RESULTS
    assert give(RESULTS, Dlpack(some())) is RESULTS  # a library that says nothing of how to make its arrays
    out, lse = give(RESULTS, Immutable(some()))
    assert isinstance(out, Immutable)
    assert isinstance(lse, Immutable)
    assert not np.shares_memory(out.array, RESULTS[0])
    assert not np.shares_memory(lse.array, RESULTS[1])


@pytest.mark.slow
def test_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `oracle`)")
    tensor = torch.arange(24, dtype=torch.float32).reshape(1, 2, 3, 4)
    for exported in (tensor, tensor.to(torch.bfloat16), tensor.transpose(1, 2), tensor[:, :0]):
        view = on_host("q", exported)
        assert str(view.dtype) == str(exported.dtype).removeprefix("torch.")
        np.testing.assert_array_equal(view.astype(np.float32), exported.to(torch.float32).numpy())
        assert not exported.numel() or view.ctypes.data == exported.data_ptr()
    with pytest.raises(ArgumentError, match=r"q cannot be taken as it is: .*detach\(\)"):
        on_host("q", tensor.requires_grad_())
    out, lse = give(RESULTS, torch.nn.Parameter(tensor.detach()))
    assert type(out) is torch.Tensor
    assert (out.data_ptr(), lse.data_ptr()) == tuple(array.ctypes.data for array in RESULTS)
