"""Partials of ranks to fold, and the part of a folded buffer that a rank is promised."""

import numpy as np


def partials(size, records, head_dim, seed=0):
    """One rank's [records, head_dim + 2] per entry; some records are empty."""
    draw = np.random.default_rng(seed)
    arrays = draw.standard_normal((size, records, head_dim + 2)).astype(np.float32)
    arrays[..., 0] *= 20
    arrays[..., 1] = np.abs(arrays[..., 1]) + 1
    empty = draw.random((size, records)) < 0.2
    arrays[empty] = 0
    arrays[empty, 0] = -np.inf
    return list(arrays)


def own_part(schedule, rank, buffer):
    """The records of the chunks that the rank is promised."""
    return buffer[schedule.chunk_slice(schedule.promised(rank), len(buffer))]
