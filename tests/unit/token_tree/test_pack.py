"""Packing: the published vectors, a trie as the oracle, and input that cannot be packed.

Arrays are NumPy's: no machine that these tests ran on has had CuPy and a GPU.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from trie import beams, packed_row

from tests.emulator.device_array import DeviceArray, namespace, on_device
from tests.support.drawn import examples
from tests.support.refusals import refused
from treeattn.errors import ArgumentError
from treeattn.token_tree import TokenTree, pack, prefix_tree, unpack

VECTORS = np.load(Path(__file__).resolve().parents[2] / "data/token_tree_vectors.npz", allow_pickle=False)
CASES = [entry["case"] for entry in json.loads(VECTORS["manifest_json"].tobytes())]


@pytest.mark.parametrize("case", CASES)
def test_the_published_implementation_packs_alike(case):
    """Its pads are another request's tokens; ours are compared elsewhere, its mask's columns here."""

    def wanted(name):
        return VECTORS[f"c{case:02d}.{name}"]

    packed = pack(wanted("beams"))
    np.testing.assert_array_equal(prefix_tree(wanted("beams")), wanted("prefix_tree"))
    np.testing.assert_array_equal(packed.lengths, wanted("n_selected"))
    np.testing.assert_array_equal(packed.unpack_map, wanted("unpacker"))
    assert packed.packed_beam.dtype == wanted("packed_beams").dtype
    assert packed.attention_mask.shape == wanted("tree_mask").shape
    for row, nodes in enumerate(packed.lengths):
        for ours, theirs in (
            (packed.packed_beam, "packed_beams"),
            (packed.packed_token_indices, "packed_token_indices"),
            (packed.position_offsets, "position_offsets"),
            (packed.attention_mask, "tree_mask"),
        ):
            np.testing.assert_array_equal(ours[row, :nodes], wanted(theirs)[row, :nodes])
        assert not packed.attention_mask[row, :, nodes:].any()
    real = np.arange(packed.packed_beam.shape[1]) < packed.lengths[:, None]
    payload = np.where(real[..., None], wanted("unpack_in"), np.nan)
    np.testing.assert_array_equal(unpack(payload, packed.unpack_map), wanted("unpack_out"))


@examples(100)
@given(beams())
def test_packing_is_a_trie(given_beams):
    packed, first = pack(given_beams), prefix_tree(given_beams)
    assert packed.packed_beam.dtype == given_beams.dtype
    assert packed.lengths.max() == packed.packed_beam.shape[1]
    for row, nodes in enumerate(packed.lengths):
        wanted = packed_row(given_beams[row])
        assert first[row].tolist() == wanted["first"]
        assert packed.packed_beam[row, :nodes].tolist() == wanted["tokens"]
        assert packed.position_offsets[row, :nodes].tolist() == wanted["depths"]
        assert packed.packed_token_indices[row, :nodes].tolist() == wanted["indices"]
        assert packed.attention_mask[row, :nodes, :nodes].tolist() == wanted["mask"]
        assert packed.unpack_map[row].tolist() == wanted["unpack_map"]
        # Pads are the row's own first node.
        assert (packed.packed_beam[row, nodes:] == given_beams[row, 0, 0]).all()
        assert not packed.packed_token_indices[row, nodes:].any()
        assert not packed.position_offsets[row, nodes:].any()
        assert packed.attention_mask[row, nodes:, 0].all()
        assert not packed.attention_mask[row, nodes:, 1:].any()
    np.testing.assert_array_equal(unpack(packed.packed_beam, packed.unpack_map), given_beams)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_slots_beyond_the_range_of_narrow_tokens(dtype):
    """Index arithmetic in the type of the tokens goes wrong past 127, or 255."""
    narrow = np.arange(300).reshape(1, 100, 3).astype(dtype)
    packed = pack(narrow)
    wide = pack(narrow.astype(np.int64))
    assert packed.lengths.tolist() == wide.lengths.tolist()
    assert packed.lengths[0] > 255
    np.testing.assert_array_equal(packed.unpack_map, wide.unpack_map)
    np.testing.assert_array_equal(unpack(packed.packed_beam, packed.unpack_map), narrow)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (np.zeros((1, 2, 3)), "float64: token ids are integers"),
        (np.zeros((1, 2, 3), bool), "bool: token ids are integers"),
        (np.zeros((2, 3), int), "expected [batch, beams, tokens]"),
        (np.zeros((0, 2, 3), int), "each at least 1"),
        (np.zeros((1, 0, 3), int), "each at least 1"),
        (np.zeros((1, 2, 0), int), "each at least 1"),
        ([[[1, 2], [3]]], "rows of equal length"),
    ],
)
def test_what_are_no_beams(bad, words):
    for take in (pack, prefix_tree):
        with refused(words):
            take(bad)


def test_maps_that_do_not_fit():
    packed = pack([[[1, 2], [1, 3]]])
    with pytest.raises(ArgumentError, match="outside the 2 nodes"):
        unpack(np.zeros((1, 2)), packed.unpack_map)
    with pytest.raises(ArgumentError, match="are needed"):
        unpack(np.zeros((2, 3)), packed.unpack_map)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_packing_stays_on_the_device(monkeypatch, dtype):
    monkeypatch.setitem(sys.modules, "cupy", namespace)
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
