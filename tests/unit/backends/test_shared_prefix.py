"""Sequences that begin with the same pages have the attention that they have alone."""

import ml_dtypes
import numpy as np
import pytest

from treeattn.backends import cpu

KINDS = [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def drawn_tables(rng, batch, pages, total):
    """Each sequence takes some pages of one before it, up to where it parts from it, and then others: some
    are the same to the end, some share nothing."""
    table = np.full((batch, pages), -1, np.int32)
    for b in range(batch):
        kept = rng.integers(0, pages + 1) if b and rng.random() < 0.8 else 0
        begin = table[rng.integers(max(b, 1)), :kept]
        others = rng.permutation(np.setdiff1d(np.arange(total), begin))[: pages - kept]
        table[b] = np.concatenate([begin, others])
    return table


def attend(q, k, v, lengths, table, scales, threads):
    records = np.full((*np.array(q.shape)[[0, 2, 1]], v.shape[3] + 2), 77, np.float32)
    cpu.PlannedAttention(records, scale=0.3, threads=threads, **scales)(q, k, v, lengths, table)
    return records


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("build")
def test_shared_pages_change_no_result(seed):
    rng = np.random.default_rng(seed)
    kind, page_size = KINDS[seed % 4], int(rng.choice([1, 16, 64]))
    batch, pages, group = (
        int(rng.integers(2, 40)),
        int(rng.integers(1, 400 // page_size + 3)),
        int(rng.choice([1, 3])),
    )
    queries, v_dim = int(rng.choice([1, 1, 2])), int(rng.choice([32, 40]))
    total = 2 * pages + 3
    k, v = (rng.standard_normal((total, page_size, 2, width)).astype(kind) for width in (40, v_dim))
    q = rng.standard_normal((batch, queries, 2 * group, 40)).astype(np.float32)
    q *= 4  # scores that differ: softmax is not flat
    scales = {"k_scale": [0.5, 2.0], "v_scale": [1.0, 3.0]} if np.dtype(kind).itemsize == 1 else {}
    table = drawn_tables(rng, batch, pages, total)
    lengths = rng.integers(0, pages * page_size + 1, batch)
    lengths[rng.random(batch) < 0.5] = pages * page_size
    table[np.arange(pages) >= -(-lengths[:, None] // page_size)] = -1
    got = attend(q, k, v, lengths, table, scales, int(rng.integers(1, 4)))
    alone = [
        attend(q[b : b + 1], k, v, lengths[b : b + 1], table[b : b + 1], scales, 1) for b in range(batch)
    ]
    for one, wanted in zip(got, np.concatenate(alone), strict=True):
        with np.errstate(all="ignore"):  # a sequence may be empty
            lse, wanted_lse = (np.log(r[..., 1]) + r[..., 0] for r in (one, wanted))
            out, wanted_out = (r[..., 2:] / r[..., 1:2] for r in (one, wanted))
        np.testing.assert_allclose(lse, wanted_lse, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(out, wanted_out, rtol=2e-5, atol=2e-5)


def test_bits_do_not_depend_on_threads(build):
    if build == "numpy":
        pytest.skip("NumPy has no threads here")
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((200, 64, 2, 64)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((6, 1, 2, 64)).astype(np.float32)
    table = np.tile(np.arange(100, dtype=np.int32), (6, 1))
    table[:, 90:] += np.arange(6, dtype=np.int32)[:, None] * 10
    given = q, k, v, np.full(6, 6400), table, {}
    assert attend(*given, 1).tobytes() == attend(*given, 3).tobytes()
