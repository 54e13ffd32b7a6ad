"""Messages to cache nodes: what is not whole is told in a sentence."""

import numpy as np
import pytest

from treeattn.cache_nodes.message import Call, LayerStep, array_of, bytes_of, decode, encode
from treeattn.errors import TransportError

Q = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
STEP = LayerStep(0, 3, None, 2, [1], None, [bytes_of(Q)])


def test_what_was_encoded_is_there():
    step = decode(bytearray(encode(STEP)))
    assert step.counts == [1]
    assert (array_of(step.arrays[0], Q.shape, Q.dtype) == Q).all()
    assert decode(bytearray(encode(Call("select", {"rows": np.arange(2)})))) == Call(
        "select", {"rows": [0, 1]}
    )


@pytest.mark.parametrize("size", range(len(encode(STEP))))
def test_what_is_cut_off_is_refused(size):
    with pytest.raises(TransportError, match="a message to cache nodes is damaged or not whole"):
        decode(bytearray(encode(STEP)[:size]))


@pytest.mark.parametrize("shape", [(1, 2, 2), (1, 3, 3)])
def test_arrays_of_another_size_are_refused(shape):
    with pytest.raises(TransportError, match="a message to cache nodes has other arrays than it says"):
        array_of(STEP.arrays[0], shape, Q.dtype)
