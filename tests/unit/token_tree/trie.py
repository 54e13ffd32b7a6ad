"""Packing written to be obviously right, a dictionary of prefixes for each batch row; and beams to pack."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays


def packed_row(beams: Any) -> dict[str, Any]:
    """What `pack` must say of one batch row [beams, tokens], without pads."""
    slots: dict[tuple[int, ...], int] = {}
    indices = []
    for m, beam in enumerate(beams.tolist()):
        for c in range(len(beam)):
            prefix = tuple(beam[: c + 1])
            if prefix not in slots:
                slots[prefix] = len(slots)
                indices.append(m * len(beam) + c)
    prefixes = list(slots)
    return {
        "tokens": [prefix[-1] for prefix in prefixes],
        "parents": [slots.get(prefix[:-1], -1) for prefix in prefixes],
        "depths": [len(prefix) - 1 for prefix in prefixes],
        "mask": [[query[: len(key)] == key for key in prefixes] for query in prefixes],
        "unpack_map": [
            [slots[tuple(beam[: c + 1])] for c in range(len(beam))] for beam in beams.tolist()
        ],
        "indices": indices,
        "first": [
            [min(k for k, other in enumerate(beams.tolist()) if other[: c + 1] == beam[: c + 1])
             for c in range(len(beam))]
            for beam in beams.tolist()
        ],
    }  # fmt: skip


@st.composite
def beams(draw):
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)))
    dtype = draw(st.sampled_from(["int8", "uint8", "int32", "int64", "uint64"]))
    vocabulary = draw(st.integers(1, 4))
    return draw(arrays(dtype, shape, elements=st.integers(0, vocabulary - 1)))
