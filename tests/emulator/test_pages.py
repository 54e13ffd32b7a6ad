"""`decode` and `Decoder` over pages with device="cuda", one rank, on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import treeattn
from tests.support.exporters import OnGpu
from tests.support.pages import in_pages
from treeattn.errors import RestrictionError

from .runtime import EmulatorRuntime

Array = np.ndarray[Any, Any]
PAGE_SIZE, LENGTHS = 16, np.array([90, 37])
SHAPE: dict[str, Any] = {
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "batch": 2,
    "queries": 2,
    "dtype": "float16",
}


def cache() -> tuple[Array, tuple[Array, Array], tuple[Array, Array], Array]:
    """q, the tokens in a row and in pages, and the block table."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 2, 4, 64)).astype(np.float16)
    k, v = (rng.standard_normal((2, 90, 2, 64)).astype(np.float16) for _ in "kv")
    (pages, table), (values, _) = (in_pages(one, PAGE_SIZE, LENGTHS) for one in (k, v))
    return q, (k, v), (pages, values), table


def test_a_decoder_follows_its_table_of_the_host(runtime: EmulatorRuntime) -> None:
    """Longer by a page now and then, in room that is there; a table on the GPU says the same."""
    q, row, pages, table = cache()
    with (
        treeattn.Decoder(**SHAPE, device="cuda", cache=treeattn.CacheFormat(page_size=PAGE_SIZE)) as paged,
        treeattn.Decoder(**SHAPE, device="cuda") as plain,
    ):
        for step, length in enumerate((64, 65, 70, 80, 90)):
            lengths = np.minimum(LENGTHS, length)
            given = table[:, : -(-length // PAGE_SIZE)].tolist()
            before = runtime.allocations
            found = [[*paged(q, treeattn.Shard(*pages, lengths, block_table=given))]]
            assert step < 1 or runtime.allocations == before
            there = treeattn.Shard(*pages, lengths, block_table=OnGpu(np.array(given, np.int32)))
            found.append([*treeattn.decode(q, there, device="cuda")])
            wanted = [one.tobytes() for one in plain(q, *row, lengths)]
            assert [[one.tobytes() for one in results] for results in found] == [wanted] * 2


@pytest.mark.usefixtures("runtime")
def test_pages_are_not_captured_yet() -> None:
    q, _, pages, _ = cache()
    with (
        treeattn.Decoder(**SHAPE, device="cuda", cache=treeattn.CacheFormat(page_size=PAGE_SIZE)) as decoder,
        pytest.raises(RestrictionError, match="a captured step takes no block table"),
    ):
        decoder.capture(q, *pages, LENGTHS)
