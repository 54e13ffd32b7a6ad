"""Partial results that other kernels made, merged over the ranks by any scheme.

What flash kernels leave (``out``, already divided, and the logsumexp of its scores) is a partial: a record
with maximum lse, denominator 1 and numerator out, up to how the maximum rounds (FlashInfer calls it an
attention state; Tree Attention, arXiv 2408.04093, section 5, reduces nothing else). So any reduction of this
package merges it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import partial
from treeattn.attention import arrays
from treeattn.attention.arrays import AnyArray
from treeattn.attention.shape import DTYPES, dtype_word, query_dtype
from treeattn.backends import device as devices
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.communicator import Given
from treeattn.collectives.runtime.memory import StreamOrder
from treeattn.collectives.runtime.reducer import Owner
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.reducers import folding, plan_reducer
from treeattn.decoder.request import Reduction, telling_arguments
from treeattn.errors import ArgumentError
from treeattn.mpi import communicators
from treeattn.mpi.communicators import Agreement, collectively
from treeattn.partial import Array

if TYPE_CHECKING:
    from typing_extensions import Self

_NATURAL_LOG = {"e": 1.0, 2: math.log(2)}  # of the bases that kernels write
_ALL = "merge folds finished parts and gives every rank, or rank 0, all of the result"


@telling_arguments
def merge(
    out: AnyArray,
    lse: AnyArray,
    *,
    comm: Given = None,
    scheme: str | Schedule | Reduction | None = None,
    base: str | int = "e",
    strict: bool = False,
    device: str | None = None,
) -> tuple[Array, Array]:
    """Attention over all ranks' tokens from what each rank's own kernel made of its part. Collective.

    Plans, merges once and tears down: in a loop keep a `Merger`.

    Parameters
    ----------
    out : [.., head_dim]
        This rank's attention over its tokens alone; float32, float16, bfloat16 (or its bits, uint16) or
        float64. The same shape on every rank, any strides, any library's arrays as in `treeattn.decode`.
    lse : [..]
        The logsumexp of its scaled scores in `base`; float32, on the host also float64. -inf, +inf or NaN
        marks a part that saw nothing, whatever its out holds: serving kernels write each of them.
    comm, device
        As for `treeattn.decode`.
    scheme : str, Schedule or Reduction, optional
        As for `treeattn.decode`, but for schemes that leave each rank a slice, and those that attend while
        they communicate.
    base : {"e", 2}
        Of the logarithm in lse: "e" (torch, vLLM, SGLang) or 2 (FlashInfer).
    strict : bool
        Whether only -inf marks a part that saw nothing.

    Returns
    -------
    out, lse
        Of the whole, the same on every rank (of ``output="root"`` on rank 0, elsewhere None), lse in `base`:
        float32, float64 for float64 out; 0 and -inf where no rank saw anything. A NaN in out with a finite
        lse reaches the result.

    Raises
    ------
    ArgumentError, ScheduleError, RestrictionError, BackendError, TransportError
        The same on every rank; with `strict` for an lse of +inf or NaN, too.

    Examples
    --------
    >>> out, lse = np.ones((3, 8), np.float32), np.zeros(3, np.float32)  # of this rank's keys
    >>> whole, whole_lse = treeattn.merge(out, lse, base=2)
    >>> whole.shape, whole_lse.tolist()  # of one rank: what it gave
    ((3, 8), [0.0, 0.0, 0.0])
    """
    comm = communicators.intracomm(comm)
    with Agreement(comm, "merge"):
        where = devices.find(arrays.device_of("out", out) if device is None else device)
        part = where.view("out", out), where.view("lse", lse)
        *rows, head_dim = part[0].shape or (0,)
        parts = Parts(tuple(rows), head_dim, query_dtype(part[0]))
        parts.check(*part, where.lse_dtypes)
    options: dict[str, Any] = {"scheme": scheme, "base": base, "strict": strict, "device": where.name}
    with Merger(comm, **asdict(parts), **options) as merger:
        return arrays.give(merger(*part), out)


@dataclass(frozen=True, slots=True)
class Parts:
    """What must be the same of every rank's part."""

    lse_shape: tuple[int, ...]
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_word(self.dtype))
        if self.dtype not in DTYPES:
            raise ArgumentError(f"dtype {self.dtype!r} is not supported: use one of {', '.join(DTYPES)}")
        for name, sizes, least in (("lse_shape", self.lse_shape, 0), ("head_dim", (self.head_dim,), 1)):
            if not all(isinstance(n, int | np.integer) and n >= least for n in sizes):
                raise ArgumentError(f"{name} {list(sizes)}: whole numbers, at least {least}, are needed")
        object.__setattr__(self, "lse_shape", tuple(map(int, self.lse_shape)))  # NumPy's could overflow

    @property
    def record_dtype(self) -> np.dtype[Any]:
        """The type of records and results."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    def check(self, out: Array, lse: Array, lse_dtypes: tuple[str, ...]) -> None:
        """Raise `ArgumentError` unless they are such a part, with lse of one of these types."""
        for name, array, shape in (("out", out, (*self.lse_shape, self.head_dim)),
                                   ("lse", lse, self.lse_shape)):  # fmt: skip
            if tuple(array.shape) != shape:
                raise ArgumentError(
                    f"{name} has shape {list(array.shape)}, expected {list(shape)}: out is [.., head_dim], "
                    "lse [..], its axes in the same order (lse of [heads, tokens] has to be transposed)"
                )
        bits = self.dtype == "bfloat16" and out.dtype == np.uint16
        if out.dtype != DTYPES[self.dtype] and not bits:
            raise ArgumentError(f"out is {out.dtype}, expected {self.dtype}")
        if lse.dtype.name not in lse_dtypes:
            raise ArgumentError(
                f"lse is {lse.dtype}: pass it as {' or '.join(lse_dtypes)}, as kernels write it"
            )


class Merger:
    """A planned `merge`: everything that can be done once is done once. Creating it is collective.

    Parameters
    ----------
    lse_shape : tuple of int
        The shape of lse; out has head_dim as one axis more.
    head_dim : int
        The last axis of out.
    dtype : str
        Of out: "float32", "float16", "bfloat16", or on the CPU "float64".
    comm, scheme, base, strict
        As for `merge`.
    device : {"cpu", "cuda"}
        Where out and lse lie.

    Notes
    -----
    A call returns (out, lse) in the merger's own buffers, which hold until its next call; in the container of
    out, and where that cannot share memory that changes (JAX), as copies.

    Examples
    --------
    >>> out, lse = np.ones((3, 8), np.float32), np.zeros(3, np.float32)
    >>> with treeattn.Merger(lse_shape=(3,), head_dim=8, dtype="float32") as merger:
    ...     whole, whole_lse = merger(out, lse)
    >>> whole.shape, whole_lse.shape
    ((3, 8), (3,))
    """

    def __init__(
        self,
        comm: Given = None,
        *,
        lse_shape: tuple[int, ...],
        head_dim: int,
        dtype: str = "float32",
        scheme: str | Schedule | Reduction | None = None,
        base: str | int = "e",
        strict: bool = False,
        device: str = "cpu",
    ) -> None:
        self._comm, self._strict = communicators.intracomm(comm), bool(strict)
        with Agreement(self._comm, "Merger") as agreed:
            watchdog.limit()
            self._device, self.parts = devices.find(device), Parts(tuple(lse_shape), head_dim, dtype)
            how, selection = folding(scheme, _ALL, self._comm, self._device.name, to_root=True)
            self._plan_memory(_natural_log(base))
            agreed.must_match = {
                "the shape or dtype of out and lse": self.parts,
                "scheme": selection.text,
                f"the schedule {selection.text}": selection.digest,
                "base": base,
                "strict": self._strict,
                "device": self._device.name,
                "transport": how.transport,
                "executor": how.executor,
                "output": how.output,
            }
        operator = self._device.merge_operator(self.parts.head_dim, self.parts.record_dtype)
        self._reducer = plan_reducer(self._comm, self._device, how, selection, operator, self._records)
        self.scheme, self.executor = selection.text, self._reducer.executor
        self.fallback, self._owner = self._reducer.fallback, Owner("this merger")
        given = how.output != "root" or self._comm.rank == 0
        self._containers = arrays.Containers(self._device.view, self._results, given)
        self.out, self.lse = self._containers.results

    def _plan_memory(self, natural_log: float) -> None:
        """Records, results, and the steps between them; finish sees each part as a sequence of its own."""
        shape, head_dim, dtype = self.parts.lse_shape, self.parts.head_dim, self.parts.record_dtype
        empty, count = self._device.memory.empty, math.prod(shape)
        self._records = empty((*shape, head_dim + partial.EXTRA), dtype)
        self._results: tuple[Array, Array] = empty((*shape, head_dim), dtype), empty(shape, dtype)
        out, lse = self._results
        self._pack = self._device.pack(self._records, natural_log)
        self._finish = self._device.finish(
            self._records.reshape(count, 1, 1, head_dim + partial.EXTRA),
            out.reshape(count, 1, 1, head_dim),
            lse.reshape(count, 1, 1),
        )
        self._scale = None if natural_log == 1 else self._device.scale(lse, 1 / natural_log)
        self._in_order = StreamOrder(self._device.stream)

    def __call__(self, out: AnyArray, lse: AnyArray) -> tuple[Array, Array]:
        """Merge once: (out, lse), valid until the next call. Every rank must call.

        Raises `ArgumentError` for arrays that do not fit the plan, on one rank alone as a `Decoder` does;
        for what `strict` refuses on every rank, which it asks first.
        """
        self._owner.take()
        out, lse = self._containers.take(out, lse, names=("out", "lse"))
        self.parts.check(out, lse, self._device.lse_dtypes)
        if self._strict:
            collectively(self._comm, lambda: _check_marks(self._device.to_host(lse)))
        self._in_order()
        self._pack(out, lse)
        self._reducer()
        self._finish()
        if self._scale is not None:
            self._scale()
        return self._containers.give()

    def close(self) -> None:
        """Release communicator and requests. Collective."""
        self._owner.check()
        self._reducer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._reducer.__exit__(*exception)


def _natural_log(base: object) -> float:
    if not isinstance(base, str | int) or base not in _NATURAL_LOG:
        raise ArgumentError(f"base {base!r} is unknown: use 'e' (torch, vLLM, SGLang) or 2 (FlashInfer)")
    return _NATURAL_LOG[base]


def _check_marks(lse: Array) -> None:
    """Raise `ArgumentError` for an lse that is +inf or NaN."""
    found = np.argwhere(np.isnan(lse) | (lse == np.inf))
    if len(found):
        raise ArgumentError(
            f"lse is +inf or NaN in {len(found)} of {lse.size} places, first at {found[0].tolist()}: only "
            "-inf marks a part that saw nothing; without strict=True these count as such too"
        )
