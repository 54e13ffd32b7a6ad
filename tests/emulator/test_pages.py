"""`decode` and `Decoder` over pages with device="cuda", one rank, on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import treeattn
from tests.support import arguments
from tests.support.exporters import OnGpu
from tests.support.pages import in_pages
from treeattn.errors import ArgumentError, RestrictionError

from .raw_module import compiler_problem
from .runtime import EmulatorRuntime

Array = np.ndarray[Any, Any]
pytestmark = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
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


RULES: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True, "window": (20, None), "leading": 3, "q_positions": np.array([85, 40]), "softcap": 9.0},
)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.usefixtures("runtime")
def test_pages_have_the_bits_of_a_cache_in_a_row(rules: dict[str, Any]) -> None:
    """With the table on the GPU, or on the host, of any integers."""
    q, row, pages, table = cache()
    plain = treeattn.decode(
        device="cuda", **arguments.call(q=q, k=row[0], v=row[1], lengths=LENGTHS, **rules)
    )
    wanted = [one.tobytes() for one in plain]
    for given in (table, table.tolist(), OnGpu(table)):
        shard = {"k": pages[0], "v": pages[1], "lengths": LENGTHS, "block_table": given}
        found = treeattn.decode(device="cuda", **arguments.call(q=q, **shard, **rules))
        assert [one.tobytes() for one in found] == wanted


def test_a_decoder_follows_its_table_of_the_host(runtime: EmulatorRuntime) -> None:
    """Longer by a page now and then, in room that is there."""
    q, row, pages, table = cache()
    with (
        treeattn.Decoder(**SHAPE, device="cuda", cache=treeattn.CacheFormat(page_size=PAGE_SIZE)) as paged,
        treeattn.Decoder(**SHAPE, device="cuda") as plain,
    ):
        for step, length in enumerate((64, 65, 70, 80, 90)):
            lengths = np.minimum(LENGTHS, length)
            given = table[:, : -(-length // PAGE_SIZE)].tolist()
            before = runtime.allocations
            out, lse = paged(q, treeattn.Shard(*pages, lengths, block_table=given))
            assert step < 1 or runtime.allocations == before
            wanted = [one.tobytes() for one in plain(q, *row, lengths)]
            assert [out.tobytes(), lse.tobytes()] == wanted


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": [[0, 1, 2, 3, 4, 99]] * 2}, r"block_table\[0, 5\] is 99, but k and v have"),
        ({"block_table": [[0, 1, 2, 3, -1, 5]] * 2}, r"block_table\[0, 4\] is -1, no page"),
        ({"block_table": [[0, 1, 2, 3, 2, 5]] * 2}, "has page 2 twice in sequence 0"),
        ({"block_table": [[0, 1]] * 2}, "a length of 90 is more than the block table holds"),
        ({"block_table": [0, 1]}, r"whole numbers \[batch, pages of a sequence\]"),
        ({"block_table": np.zeros((2, 9))}, "the block table is float64"),
        ({"lengths": None}, "needs lengths="),
    ],
)
@pytest.mark.usefixtures("runtime")
def test_what_cannot_be_is_refused(rules: dict[str, Any], change: dict[str, Any], message: str) -> None:
    q, _, pages, table = cache()
    given: dict[str, Any] = {"lengths": LENGTHS, "block_table": table} | change
    with pytest.raises(ArgumentError, match=message):
        treeattn.decode(device="cuda", **arguments.call(q=q, k=pages[0], v=pages[1], **given, **rules))


@pytest.mark.usefixtures("runtime")
def test_pages_are_not_captured_yet() -> None:
    q, _, pages, _ = cache()
    with (
        treeattn.Decoder(**SHAPE, device="cuda", cache=treeattn.CacheFormat(page_size=PAGE_SIZE)) as decoder,
        pytest.raises(RestrictionError, match="a captured step takes no block table"),
    ):
        decoder.capture(q, *pages, LENGTHS)
