"""Packing asks the library of its arrays for everything, as arrays of a GPU need it.

No machine that these tests ran on had CuPy and a GPU. A stand-in with NumPy inside takes CuPy's place: it has
the functions that packing uses, and refuses what CuPy refuses: NumPy's own functions on its arrays, and
NumPy's arrays among its operands.
"""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from treeattn.token_tree import TokenTree, mask_from_words, mask_words, pack, prefix_tree, unpack


class DeviceArray(np.ndarray):
    """An array that NumPy's functions do not take."""

    def __array_function__(self, function, *_):
        raise TypeError(f"numpy.{function.__name__} of a device array")

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        plain = [_plain(array) for array in inputs]
        results = getattr(ufunc, method)(*plain, out=tuple(map(_plain, out)) or None, **options)
        return out[0] if out else _on_device(results)

    def __getitem__(self, index):
        return _on_device(_plain(self)[_plain_index(index)])

    def __setitem__(self, index, value):
        _plain(self)[_plain_index(index)] = _plain(value)

    def get(self):
        return _plain(self).copy()


def _plain(array):
    """As NumPy's. A NumPy array is none of the device's: CuPy refuses it."""
    if isinstance(array, DeviceArray):
        return array.view(np.ndarray)
    if isinstance(array, np.ndarray) and array.ndim:
        raise TypeError("a NumPy array among those of the device")
    return array


def _plain_index(index):
    return tuple(map(_plain, index)) if isinstance(index, tuple) else _plain(index)


def _on_device(result):
    if isinstance(result, tuple):
        return tuple(map(_on_device, result))
    return np.asarray(result).view(DeviceArray)


def _function(name):
    inner = getattr(np, name)

    def call(*given, **options):
        return _on_device(inner(*map(_plain, given), **options))

    return call


NAMES = (
    *("arange", "ascontiguousarray", "asarray", "cumsum", "empty", "lexsort", "nonzero", "ones"),
    *("packbits", "repeat", "take_along_axis", "unique", "unpackbits", "zeros"),
)


@pytest.fixture
def cupy(monkeypatch):
    module = types.ModuleType("cupy")
    for name in NAMES:
        setattr(module, name, _function(name))
    module.ndarray, module.int64, module.uint32, module.uint8 = DeviceArray, np.int64, np.uint32, np.uint8
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_packing_stays_on_the_device(cupy, dtype):
    beams = np.random.default_rng(0).integers(0, 3, (3, 6, 5)).astype(dtype)
    there, wanted = pack(_on_device(beams)), pack(beams)
    for ours, here in zip(there, wanted, strict=True):
        assert type(ours) is DeviceArray
        np.testing.assert_array_equal(ours.get(), here)
    np.testing.assert_array_equal(prefix_tree(_on_device(beams)).get(), prefix_tree(beams))
    words = mask_words(there.attention_mask)
    np.testing.assert_array_equal(words.get(), mask_words(wanted.attention_mask))
    back = mask_from_words(words, wanted.attention_mask.shape[-1])
    np.testing.assert_array_equal(back.get(), wanted.attention_mask)
    payload = np.random.default_rng(1).random((*wanted.packed_beam.shape, 2))
    unpacked = unpack(_on_device(payload), there.unpack_map)
    np.testing.assert_array_equal(unpacked.get(), unpack(payload, wanted.unpack_map))
    assert TokenTree.from_beams(_on_device(beams)).digest == TokenTree.from_beams(beams).digest


def test_the_stand_in_refuses_what_cupy_refuses(cupy):
    array = _on_device(np.arange(3))
    for wrong in (lambda: np.cumsum(array), lambda: array + np.arange(3), lambda: array[np.arange(2)]):
        with pytest.raises(TypeError):
            wrong()
