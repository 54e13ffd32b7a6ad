"""The tables of what a query may see, where the compiled kernels find them."""

from __future__ import annotations

import ctypes

import numpy as np

from treeattn.attention.mask_tables import MaskTables
from treeattn.backends.cpu.records import address


class _Tables(ctypes.Structure):
    """struct mask of kernels/cpu/visible.h."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("intervals", "q_positions", "runs", "slopes")]
        + [(name, ctypes.c_void_p) for name in ("mask", "draft_begins", "draft_positions")]
        + [(name, ctypes.c_int64) for name in ("run_count", "drafts", "mask_words")]
        + [("softcap", ctypes.c_float)]
    )


class PlannedTables:
    """Addresses of the arrays of a `MaskTables`."""

    def __init__(self, mask: MaskTables) -> None:
        rules = mask.rules
        slopes = None if rules.alibi is None else np.array(rules.alibi)
        self._mask = mask
        self._owned = [mask.intervals, mask.q_positions, mask.draft_begins, slopes]
        self._tables = _Tables(
            intervals=address(mask.intervals),
            q_positions=address(mask.q_positions),
            draft_begins=address(mask.draft_begins),
            slopes=None if slopes is None else address(slopes),
            softcap=rules.softcap or 0,
        )
        self._version = -1
        self.follow()

    @property
    def address(self) -> int:
        """The address of the struct visible; `follow` keeps it up to date."""
        return ctypes.addressof(self._tables)

    def follow(self) -> None:
        """Take over arrays that replaced others."""
        mask = self._mask
        if self._version == mask.version:
            return
        self._version = mask.version
        runs, words, drafts, tables = mask.runs.table, mask.mask, mask.draft_positions, self._tables
        tables.runs, tables.run_count = address(runs), len(runs)
        tables.mask, tables.mask_words = address(words), words.shape[2]
        tables.draft_positions, tables.drafts = address(drafts), mask.drafts
        self._replaceable = runs, words, drafts
