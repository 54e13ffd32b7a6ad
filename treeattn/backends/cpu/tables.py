"""The tables of what a query may see, where the compiled kernels find them."""

from __future__ import annotations

import ctypes

import numpy as np

from treeattn.attention.visibility import Visible
from treeattn.backends.cpu import arguments

__all__ = ["PlannedTables"]


class _Tables(ctypes.Structure):
    """struct visible of kernels/cpu/visible.h."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("intervals", "q_positions", "runs", "slopes")]
        + [(name, ctypes.c_void_p) for name in ("mask", "draft_begins", "draft_positions")]
        + [(name, ctypes.c_int64) for name in ("run_count", "drafts", "mask_words")]
        + [("softcap", ctypes.c_float)]
    )


class PlannedTables:
    """Addresses of the arrays of a `Visible`."""

    def __init__(self, visible: Visible) -> None:
        rules = visible.rules
        slopes = None if rules.slopes is None else np.array(rules.slopes)
        self._visible = visible
        self._owned = [visible.intervals, visible.q_positions, visible.draft_begins, slopes]
        self._tables = _Tables(
            intervals=arguments.address(visible.intervals),
            q_positions=arguments.address(visible.q_positions),
            draft_begins=arguments.address(visible.draft_begins),
            slopes=None if slopes is None else arguments.address(slopes),
            softcap=rules.softcap,
        )
        self._version = -1
        self.follow()

    @property
    def address(self) -> int:
        """Of the struct visible; `follow` keeps it up to date."""
        return ctypes.addressof(self._tables)

    def follow(self) -> None:
        """Take over arrays that stand where others were."""
        visible = self._visible
        if self._version == visible.version:
            return
        self._version = visible.version
        runs, mask, drafts, tables = visible.runs.table, visible.mask, visible.draft_positions, self._tables
        tables.runs, tables.run_count = arguments.address(runs), len(runs)
        tables.mask, tables.mask_words = arguments.address(mask), mask.shape[2]
        tables.draft_positions, tables.drafts = arguments.address(drafts), visible.drafts
        self._replaceable = runs, mask, drafts
