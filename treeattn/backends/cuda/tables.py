"""What queries see, as the CUDA kernels read it: tables of the device that follow a `MaskTables`.

A block works for a tile of query rows, so what matters is what the queries of a tile see together: spans of
tokens, found here by a sort of their intervals. What nobody of a tile sees is neither read nor counted when
splits are chosen. The tables keep their places, so a captured graph reads what was uploaded last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treeattn.attention.mask_tables import MaskTables
from treeattn.backends.cuda.runtime import Runtime, structure
from treeattn.errors import ArgumentError
from treeattn.partial import Array

_NO_DRAFT = np.int32(2**31 - 1)

# TileView, Span and TokenTables of kernels/cuda/tokens.cuh.
_TILE = structure("", "", "first_span spans steps begin end whole_begin whole_end draft_begin")
_SPAN = structure("", "", "begin end first_step unused")
_LOOKUP = structure("runs mask draft_positions", "run_count drafts mask_words", "")


class Spans(NamedTuple):
    """Ascending, of all tiles one after another. begin, end: tokens. counts: spans of each tile."""

    begin: Array
    end: Array
    counts: Array


def find_spans(pieces: Array) -> Spans:
    """What the pieces of each tile cover together: pieces [tiles, n, 2] of tokens begin..end, in any order;
    those that overlap or touch become one."""
    order = np.argsort(pieces[..., 0], axis=1)
    begin, end = (np.take_along_axis(pieces[..., side], order, axis=1) for side in (0, 1))
    end = np.maximum.accumulate(np.where(end > begin, end, -1), axis=1)
    before = np.concatenate([np.full_like(end[:, :1], -1), end[:, :-1]], axis=1)
    opens = (end > before) & (begin > before)
    first = np.flatnonzero(opens)
    # A span reaches as far as all pieces before the next span do, or all of its tile.
    last = np.append(first[1:], opens.size) - 1
    last = np.minimum(last, first // opens.shape[1] * opens.shape[1] + opens.shape[1] - 1)
    return Spans(begin.ravel()[first], end.ravel()[last], opens.sum(axis=1))


def _queries_of_tiles(queries: int, group: int, rows: int) -> Array:
    """[tiles, the most of a tile]: the last one again where a tile has fewer."""
    begin = np.arange(0, queries * group, rows)
    first, last = begin // group, (np.minimum(begin + rows, queries * group) - 1) // group
    width = int((last - first).max()) + 1
    return np.asarray(np.minimum(first[:, None] + np.arange(width), last[:, None]))


class VisibleTables:
    """The tables of a `MaskTables` for tiles of so many rows, on a device."""

    def __init__(
        self, mask: MaskTables, runtime: Runtime, heads: int, *, group: int, rows: int, step: int
    ) -> None:
        """rows: of a tile, numbered query * group + head; step: tokens that a block takes at a time."""
        self.tiling = {"group": group, "rows": rows, "step": step}
        batch, queries = mask.q_positions.shape
        self._mask, self._runtime, self._step = mask, runtime, step
        self._queries = _queries_of_tiles(queries, group, rows)
        tiles, width = self._queries.shape
        slopes = mask.rules.alibi
        sizes = {
            "lookup": (1, _LOOKUP),
            "tiles": (batch * tiles, _TILE),
            "spans": (batch * tiles * (2 * width + 1), _SPAN),
            "views": (batch * queries * 4, np.dtype(np.int32)),
            "q_positions": (batch * queries, np.dtype(np.int64)),
            "slopes": (0 if slopes is None else heads, np.dtype(np.float32)),
        }
        places = np.cumsum([0, *(-(-count * kind.itemsize // 16) * 16 for count, kind in sizes.values())])
        self._host = np.zeros(int(places[-1]), np.uint8)
        self._device = runtime.zeros(self._host.size, np.uint8)
        self._tables: dict[str, Array] = {}
        #: Where each table lies, for the kernel's arguments; 0 where there is none.
        self.addresses: dict[str, int] = {}
        for (name, (count, kind)), place in zip(sizes.items(), places[:-1].tolist(), strict=True):
            self._tables[name] = self._host[place : place + count * kind.itemsize].view(kind)
            self.addresses[name] = runtime.address(self._device) + place if count else 0
        if slopes is not None:
            self._tables["slopes"][:] = slopes
        self._held: list[Array] = []  # of the lookup: what was outgrown stays, a launch may still read it
        self._version, self._seen = -1, np.empty(0, np.int64)
        #: Steps of the tile that has the most, and one more than the last token that anybody sees.
        self.steps = self.end = 0

    def refresh(self) -> bool:
        """Queue what changed of the `MaskTables` to the device; whether anything did.

        Raises `ArgumentError` while the stream is captured: a graph would repeat these values.
        """
        mask = self._mask
        seen = np.concatenate(
            [mask.intervals.ravel(), mask.draft_begins, mask.q_positions.ravel()], dtype=np.int64
        )
        if mask.version == self._version and np.array_equal(seen, self._seen):
            return False
        if self._runtime.capturing():
            raise ArgumentError(
                "a captured step reads what queries see from the GPU: make one step before the capture, and "
                "refresh() what changes later"
            )
        if mask.version != self._version:
            self._look_up()
        if self._mask.intervals.shape[:2] == (1, 1) and len(self._queries) == 1:
            self.fill_one()
        else:
            self.fill()
        self._runtime.upload(self._device, self._host)
        self._version, self._seen = mask.version, seen
        return True

    def _look_up(self) -> None:
        """Runs, mask and draft positions: what may grow, and is reached through the table of its places."""
        mask, lookup = self._mask, self._tables["lookup"]
        arrays: dict[str, Array] = {
            "runs": mask.runs.table,
            "draft_positions": mask.draft_positions,
            "mask": mask.mask,
        }
        packed = np.concatenate([array.ravel().view(np.uint8) for array in arrays.values()])
        if not self._held or self._held[-1].size < packed.size:
            self._held.append(self._runtime.zeros(packed.size * 3 // 2, np.uint8))
        room, place = self._held[-1], 0
        for name, array in arrays.items():
            lookup[name] = self._runtime.address(room) + place
            place += array.nbytes
        lookup["run_count"], lookup["drafts"] = len(mask.runs.table), mask.drafts
        lookup["mask_words"] = mask.mask.shape[2]
        if packed.size:
            self._runtime.upload(room[: packed.size], packed)

    def fill_one(self) -> None:
        """`fill` for one query of one sequence in one tile, several times as fast: its intervals ascend."""
        mask, tables = self._mask, self._tables
        bounds = mask.intervals[0, 0].tolist()
        begin, drafts = int(mask.draft_begins[0]), mask.drafts
        spans: list[tuple[int, int, int, int]] = []
        steps = 0
        for first, last in (bounds[:2], bounds[2:], (begin, begin + drafts)):
            if first == last:
                continue
            if spans and spans[-1][1] == first:
                first, *_ = spans.pop()
            steps = 0 if not spans else spans[-1][2] + self._steps(*spans[-1][:2])
            spans.append((first, last, steps, 0))
        if spans:
            tables["spans"][: len(spans)] = spans
            self.end, steps = spans[-1][1], steps + self._steps(*spans[-1][:2])
        else:
            self.end = 0
        span = spans[0][:2] if spans else (0, 0)
        tables["tiles"][0] = (0, len(spans), steps, *span, *bounds[2:], begin if drafts else _NO_DRAFT)
        tables["views"][:] = bounds
        tables["q_positions"][0] = mask.q_positions[0, 0]
        self.steps = steps

    def _steps(self, begin: int, end: int) -> int:
        return -(-(end - begin) // self._step)

    def fill(self) -> None:
        """Fill the tables for this step."""
        mask, (tiles, width) = self._mask, self._queries.shape
        batch = len(mask.draft_begins)
        begins = mask.draft_begins if mask.drafts else np.full(batch, _NO_DRAFT, np.int64)
        of_tile = mask.intervals[:, self._queries]  # [batch, tiles, width, 4]
        pieces = np.empty((batch, tiles, 2 * width + 1, 2), np.int64)
        pieces[:, :, :-1] = of_tile.reshape(batch, tiles, 2 * width, 2)
        pieces[:, :, -1, 0] = begins[:, None]
        pieces[:, :, -1, 1] = begins[:, None] + mask.drafts
        spans = find_spans(pieces.reshape(batch * tiles, -1, 2))
        table = self._tables["tiles"]
        ends = np.cumsum(spans.counts)
        table["first_span"], table["spans"] = ends - spans.counts, spans.counts
        table["steps"] = self._fill_spans(spans)
        first = np.minimum(table["first_span"], max(0, len(spans.begin) - 1))
        for name, side in (("begin", spans.begin), ("end", spans.end)):
            table[name] = np.where(spans.counts > 0, side[first], 0) if len(side) else 0
        table["whole_begin"] = of_tile[..., 2].max(axis=2).ravel()
        table["whole_end"] = of_tile[..., 3].min(axis=2).ravel()
        table["draft_begin"] = np.repeat(begins, tiles)
        self._tables["views"][:] = mask.intervals.ravel()
        self._tables["q_positions"][:] = mask.q_positions.ravel()
        self.steps = int(table["steps"].max())
        self.end = int(spans.end.max(initial=0))

    def _fill_spans(self, spans: Spans) -> Array:
        """Returns the steps of each tile: every span begins one."""
        number = len(spans.begin)
        steps = -(-(spans.end - spans.begin) // self._step)
        before = np.concatenate([[0], np.cumsum(steps)])
        bounds = np.concatenate([[0], np.cumsum(spans.counts)])
        table = self._tables["spans"]
        table["begin"][:number], table["end"][:number] = spans.begin, spans.end
        table["first_step"][:number] = before[:-1] - np.repeat(before[bounds[:-1]], spans.counts)
        return np.diff(before[bounds])
