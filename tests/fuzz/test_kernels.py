"""The compiled attention over arrays that lie anywhere: the bits of arrays that lie in a row.

`make fuzz-kernels` runs it under sanitizers, which see what is touched beside the arrays.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.settings import fuzzed
from tests.support import verbs
from tests.support.problems import draw
from treeattn.backends import cpu


def records_of(case, rank, lay=np.asarray, **plan):
    """Of a shard's tokens, by the case's rules without sinks; lay: puts q, k and v where they are to lie."""
    given = case.shard(rank)
    q, k = lay(given["q"]), lay(given["k"])
    v = k[..., : case.v_dim] if case.v_dim else lay(given["v"])
    plan |= {name: given[name] for name in ("k_scale", "v_scale") if name in given}
    plan |= {"tables": case.tables(given), "block_table": given.get("block_table")}
    return verbs.records_of(cpu, q, k, v, scale=case.scale, **plan)


def anywhere(array, rng):
    """The same in memory of exactly the size that its drawn strides need, which begins anywhere for its
    type; between its rows are NaNs."""
    size, strides, reach = array.itemsize, [0] * array.ndim, array.shape[-1]
    strides[-1] = 1
    for axis in rng.permutation(array.ndim - 1):
        strides[axis] = reach + int(rng.choice([0, 0, 1, 8, 13]))
        reach = strides[axis] * array.shape[axis]
    begin = int(rng.integers(0, 17))
    last = sum((n - 1) * stride for n, stride in zip(array.shape, strides, strict=True)) if array.size else -1
    memory = np.full((begin + last + 1) * size, 0xFF, np.uint8)
    made = np.ndarray(array.shape, array.dtype, memory, begin * size, [one * size for one in strides])
    made[...] = array
    return made


@fuzzed(100)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["plain", "plain", "8 bits", "latent"]))
def test_arrays_lie_anywhere(seed, kind):
    case, rng = draw(seed, 1), np.random.default_rng(seed)
    if case.q.dtype == np.float64 or case.q.size * case.k.shape[1] > 1e7:
        return
    if kind == "8 bits" and case.q.dtype == np.float32:
        case = case.in_8_bits(seed)
    elif kind == "latent":
        case = case.latent()
    threads = int(rng.integers(1, 4))
    plain = records_of(case, 0, threads=threads)
    laid = records_of(case, 0, lambda array: anywhere(array, rng), threads=threads)
    assert laid.tobytes() == plain.tobytes()
