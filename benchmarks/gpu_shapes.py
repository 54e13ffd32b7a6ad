"""The shapes that few kernels serve, against the copy rate: python benchmarks/gpu_shapes.py [--json FILE]

8-bit caches, latent heads, trees of draft tokens, pages, batches and wide heads, each over 64 Ki tokens of
cache with a cold L2, beside bfloat16's row of the same shape. **Percent of copy rate** as in
treeattn.study.roofline.cuda; docs/results/gpu_predicted.json has what is expected of an H100 and an H200.
Each row is written when it is there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import harness
import numpy as np

from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends import cuda
from treeattn.errors import BackendError
from treeattn.study.roofline import cuda as roofline_cuda

TOKENS, PAGE, NODES = 65536, 16, 64


class Shape(NamedTuple):
    """One launch over [batch, tokens, kv_heads, head_dim]; group: query heads of a KV head; nodes: of a tree
    of draft tokens, 0 for one query; page: tokens of a page, 0 for none; latent: values are the first 512
    channels of keys."""

    what: str
    dtype: str = "bfloat16"
    group: int = 1
    kv_heads: int = 8
    head_dim: int = 128
    batch: int = 1
    nodes: int = 0
    page: int = 0
    latent: bool = False


SHAPES = (
    *(
        Shape(f"{dtype}, {group} heads a group", dtype, group)
        for group in (1, 4, 8, 16)
        for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    ),
    Shape("latent, 16 heads", group=16, kv_heads=1, head_dim=576, latent=True),
    Shape("latent, 128 heads", group=128, kv_heads=1, head_dim=576, latent=True),
    Shape("latent of 8 bits, 16 heads", "float8_e4m3fn", 16, 1, 576, latent=True),
    Shape("a tree of 64 nodes", group=4, nodes=NODES),
    Shape("pages of 16 tokens", group=4, page=PAGE),
    Shape("batch of 8", group=4, batch=8),
    Shape("heads of 256", group=4, head_dim=256),
)


class Work:
    """The launch of a shape over caches that it goes around among."""

    def __init__(self, stopwatch: Any, shape: Shape, tokens: int) -> None:
        self._runtime, self._shape = stopwatch.runtime, shape
        self._tokens = max(1, tokens // shape.batch)
        heads, queries = shape.group * shape.kv_heads, shape.nodes or 1
        self.caches = [self._cache(stopwatch, seed) for seed in range(self._count(stopwatch))]
        width = 512 if shape.latent else shape.head_dim
        records = self._runtime.empty((shape.batch, heads, queries, width + 2), np.float32)
        eight = {"kv_dtype": shape.dtype, "k_scale": 1.0, "v_scale": 1.0}
        self._planned = cuda.PlannedAttention(
            records,
            scale=shape.head_dim**-0.5,
            tables=self._tables(queries),
            runtime=self._runtime,
            **eight if shape.dtype.startswith("float8") else {},
        )
        q_shape = (shape.batch, queries, heads, shape.head_dim)
        self._q = roofline_cuda.upload_random(self._runtime, q_shape, np.dtype(np.uint16))
        self._pages = self._page_table()

    @property
    def bytes(self) -> int:
        """Of a cache, read once."""
        k, v = self.caches[0]
        return int(k.nbytes if self._shape.latent else k.nbytes + v.nbytes)

    def calls(self) -> Iterator[functools.partial[None]]:
        """One launch over each cache."""
        for k, v in self.caches:
            yield functools.partial(self._planned, self._q, k, v, None, self._pages)

    def _count(self, stopwatch: Any) -> int:
        each = 2 if self._shape.dtype == "bfloat16" else 1
        size = self._shape.batch * self._tokens * self._shape.kv_heads * self._shape.head_dim * each
        return 1 + max(1, -(-2 * stopwatch.l2_bytes // (size if self._shape.latent else 2 * size)))

    def _cache(self, stopwatch: Any, seed: int) -> tuple[Any, Any]:
        """Random numbers, repeated along the tokens."""
        s = self._shape
        shape = (s.batch, self._tokens, s.kv_heads, s.head_dim)
        if s.page:
            shape = (s.batch * self._tokens // s.page, s.page, s.kv_heads, s.head_dim)

        def filled(seed: int) -> Any:
            element = np.dtype(np.uint16 if s.dtype == "bfloat16" else np.uint8)
            rows = (min(1024, int(np.prod(shape[:2]))), s.kv_heads, s.head_dim)
            block = self._block(rows, seed)
            array = self._runtime.empty(shape, element)
            flat = array.reshape(-1, *shape[2:])
            for begin in range(0, len(flat), len(block)):
                part = flat[begin : begin + len(block)]
                self._runtime.copy(part, block[: len(part)])
            return array

        k = filled(2 * seed)
        return (k, k[..., :512]) if s.latent else (k, filled(2 * seed + 1))

    def _block(self, shape: tuple[int, ...], seed: int) -> Any:
        if self._shape.dtype == "bfloat16":
            return roofline_cuda.upload_random(self._runtime, shape, np.dtype(np.uint16), seed)
        import ml_dtypes

        numbers = np.random.default_rng(seed).standard_normal(shape)
        there = self._runtime.empty(shape, np.uint8)
        self._runtime.upload(there, numbers.astype(getattr(ml_dtypes, self._shape.dtype)).view(np.uint8))
        return there

    def _tables(self, queries: int) -> MaskTables | None:
        """Of a binary tree whose nodes are the last tokens."""
        if not self._shape.nodes:
            return None
        mask = np.zeros((1, queries, queries), bool)
        for node in range(queries):
            at = node
            while at > 0:
                mask[0, node, at] = True
                at = (at - 1) // 2
            mask[0, node, 0] = True
        tables = MaskTables(Rules(), 1, queries)
        stand = np.full((1, queries), self._tokens, np.int64)
        tables.update(
            Runs(((0, 1, self._tokens),)), self._tokens, None, stand, mask=mask, draft_positions=stand
        )
        return tables

    def _page_table(self) -> Any:
        if not self._shape.page:
            return None
        pages = self._tokens // self._shape.page
        numbers = np.random.default_rng(5).permutation(self._shape.batch * pages).astype(np.int32)
        table = self._runtime.empty((self._shape.batch, pages), np.int32)
        self._runtime.upload(table, numbers.reshape(self._shape.batch, pages))
        return table


def measure(stopwatch: Any, tokens: int, repeats: int, shapes: Any = SHAPES) -> Iterator[dict[str, Any]]:
    """A row for each shape, in turn with copies."""
    copy, moved = roofline_cuda.copy_lap(stopwatch)
    for shape in shapes:
        row = shape._asdict() | {"tokens": tokens}
        try:
            work = Work(stopwatch, shape, tokens)
            lap = roofline_cuda.captured(stopwatch.runtime, list(work.calls()))
            copying, around = roofline_cuda.median_laps(stopwatch, [copy, lap], copy, repeats)
        except BackendError as error:  # no room, or a kernel that does not load: said, and the next one
            yield row | {"problem": str(error)}
            continue
        seconds, rate = around / len(work.caches), moved / copying
        yield row | {
            "microseconds": seconds * 1e6,
            "floor_microseconds": work.bytes / rate * 1e6,
            "percent_of_copy_rate": 100 * work.bytes / seconds / rate,
            "copy_rate_gb_s": rate / 1e9,
        }


def main() -> None:
    options = harness.options(__doc__, tokens=TOKENS, repeats=11)
    software, stopwatch = harness.gpu()
    facts: dict[str, Any] = {"software": software, "device": stopwatch.facts(), "rows": []}
    for row in measure(stopwatch, options.tokens, options.repeats):
        facts["rows"].append(row)
        options.write(facts)
        print(
            row.get("problem") or "{what}: {microseconds:.0f} us, {percent_of_copy_rate:.0f} %".format(**row)
        )


if __name__ == "__main__":
    main()
