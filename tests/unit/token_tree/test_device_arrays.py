"""Packing asks the library of its arrays for everything, as arrays of a GPU need it.

No machine that these tests ran on had CuPy and a GPU: stand-ins take CuPy's place
(`tests.emulator.device_array`).
"""

import sys
import types

import numpy as np
import pytest

from tests.emulator.device_array import DeviceArray, namespace, on_device
from treeattn.token_tree import TokenTree, pack, prefix_tree, unpack


@pytest.fixture
def cupy(monkeypatch):
    module = types.ModuleType("cupy")
    vars(module).update(vars(namespace))
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_packing_stays_on_the_device(cupy, dtype):
    beams = np.random.default_rng(0).integers(0, 3, (3, 6, 5)).astype(dtype)
    there, wanted = pack(on_device(beams)), pack(beams)
    for ours, here in zip(there, wanted, strict=True):
        assert type(ours) is DeviceArray
        np.testing.assert_array_equal(ours.get(), here)
    np.testing.assert_array_equal(prefix_tree(on_device(beams)).get(), prefix_tree(beams))
    payload = np.random.default_rng(1).random((*wanted.packed_beam.shape, 2))
    unpacked = unpack(on_device(payload), there.unpack_map)
    np.testing.assert_array_equal(unpacked.get(), unpack(payload, wanted.unpack_map))
    assert TokenTree.from_beams(on_device(beams)).digest == TokenTree.from_beams(beams).digest
