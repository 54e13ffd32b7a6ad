"""A linear map of each head's result, applied where the messages are smaller: before or after the reduction.

Numerators of records are scaled and added, so a linear map of a head commutes with every merge; maxima and
denominators do not see it. Latent attention's value up-projection is such a map (DeepSeek-V2, arXiv
2405.04434, section 2.1), and one down to fewer dimensions makes records shorter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn.attention import arrays
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.shape import DTYPES, Shape, dtype_name
from treeattn.backends.device import Attention, Device
from treeattn.errors import ArgumentError
from treeattn.partial import EXTRA, Array


class Projection:
    """The map of ``project=``, [heads, v_dim, out_dim]: out_dim numbers of a head from its v_dim.

    It is copied once, into the type of the records. What it makes is computed by NumPy's BLAS library.
    """

    def __init__(self, project: Any, shape: Shape) -> None:
        """Any library's array in the memory of the host; types as for q. Raises `ArgumentError`."""
        given = arrays.on_host("project", project)
        if shape.dtype == "bfloat16" and given.dtype == np.uint16:
            given = given.view(DTYPES["bfloat16"])
        dtype_name(given)
        if given.ndim != 3 or given.shape[:2] != (shape.heads, shape.v_dim) or not given.shape[2]:
            raise ArgumentError(
                f"project has shape {list(given.shape)}, expected [heads, v_dim, out_dim] = "
                f"[{shape.heads}, {shape.v_dim}, any]"
            )
        self._matrix = np.array(given, shape.record_dtype, order="C")  # ours: what was agreed stays
        self.out_dim = int(given.shape[2])
        #: Whether records get shorter by it.
        self.narrows = self.out_dim < shape.v_dim
        #: Equal for equal maps.
        self.digest = f"{given.shape} {hashlib.sha256(self._matrix.tobytes()).hexdigest()[:16]}"

    def before_merging(
        self, device: Device, shape: Shape, records: Array, scale: float, tables: MaskTables | None
    ) -> Attention:
        """Attention as `Device.attention` plans it, but into records [batch, heads, queries, out_dim + 2]."""
        partials = device.memory.empty((*shape.lse_shape, shape.v_dim + EXTRA), shape.record_dtype)
        attention = device.attention(shape, partials, scale, tables)
        matrix, wide, narrow = self._matrix, partials[..., EXTRA:], records[..., EXTRA:]

        def attend(q: Array, k: Array, v: Array, *lengths_and_pages: Any) -> None:
            attention(q, k, v, *lengths_and_pages)
            records[..., :EXTRA] = partials[..., :EXTRA]
            with np.errstate(all="ignore"):
                np.matmul(wide, matrix, out=narrow)

        return attend

    def after_finish(
        self, finish: Callable[[], object], divided: Array, out: Array, heads: slice
    ) -> Callable[[], object]:
        """`finish`, which writes `divided` [batch, queries, heads, v_dim] of these heads, and then `out`."""
        matrix, source, target = self._matrix[heads], divided.swapaxes(1, 2), out.swapaxes(1, 2)

        def project() -> None:
            finish()
            with np.errstate(all="ignore"):
                np.matmul(source, matrix, out=target)

        return project
