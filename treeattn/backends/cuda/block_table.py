"""Block tables of steps: of the host, looked at and copied, or of the device, used as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn.attention import arrays
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.pages import CheckedTable, as_table
from treeattn.backends.cuda.arguments import check_table
from treeattn.backends.cuda.runtime import Runtime
from treeattn.errors import ArgumentError


class BlockTables:
    """The block tables of one decoder's steps."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._checked = runtime, CheckedTable()
        self._room: Any = runtime.zeros(0, np.int32)

    def take(self, block_table: Any, batch: int) -> Any:
        """int32 [batch, pages of a sequence], where it lies. Raises `ArgumentError`."""
        if not arrays.lies_on_gpu("block_table", block_table, self._runtime):
            return as_table(block_table, batch)
        table = arrays.on_gpu("block_table", block_table, self._runtime)
        check_table(table, batch)
        return table

    def admit(
        self,
        block_table: Any,
        batch: int,
        cache: tuple[int, ...],
        lengths: Callable[[int], Any],
        tables: MaskTables | None,
    ) -> Any:
        """A block table on the device; one of the host is checked first, as `CheckedTable.check` does.
        lengths: gives them on the host, for so many tokens."""
        table = self.take(block_table, batch)
        if arrays.lies_on_gpu("block_table", block_table, self._runtime):
            return table
        if self._runtime.capturing():
            raise ArgumentError(
                "a captured step reads its block table from the GPU: pass it as an int32 device array"
            )
        valid = lengths(table.shape[1] * cache[1]) if tables is None else None
        self._checked.check(table, cache, valid, tables)
        if self._room.size < table.size:
            self._room = self._runtime.zeros(table.size * 3 // 2, np.int32)
        into = self._room[: table.size].reshape(table.shape)
        self._runtime.upload(into, table)
        return into
