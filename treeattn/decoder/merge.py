"""Partial results that other kernels made, merged over the ranks by any scheme.

What flash kernels leave (``out``, already divided, and the logsumexp of its scores) is a partial: a record
with maximum lse, denominator 1 and numerator out (FlashInfer calls it an attention state; Tree Attention,
arXiv 2408.04093, section 5, reduces nothing else). So any reduction of this package merges it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import comm as comm_
from treeattn import partial
from treeattn.attention import arrays
from treeattn.attention.shape import DTYPES, dtype_name
from treeattn.collectives import waiting
from treeattn.collectives.catalog import Selection
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import device as devices
from treeattn.decoder import executor as executors
from treeattn.decoder import transport as transports
from treeattn.decoder.device import Device
from treeattn.decoder.plan import folding, plan_reducer
from treeattn.errors import ArgumentError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Merger", "merge"]

_NATURAL_LOG = {"e": 1.0, 2: math.log(2)}  # of the bases that kernels write


def merge(
    out: Any,
    lse: Any,
    *,
    comm: Intracomm | None = None,
    scheme: str | Schedule = "hierarchical",
    base: str | int = "e",
    strict: bool = False,
    device: str | None = None,
    transport: str | None = None,
    dtype: str | None = None,
    executor: str | None = None,
) -> tuple[Any, Any]:
    """Attention over all ranks' tokens from what each rank's own kernel made of its part. Collective.

    out: [.., head_dim], this rank's attention over its tokens alone; float32, float16, bfloat16 (or its bits:
    uint16 with ``dtype="bfloat16"``) or float64. lse: [..], the logsumexp of its scaled scores in `base`,
    ``"e"`` (torch, vLLM, SGLang) or 2 (FlashInfer); float32, on the host also float64. The same shape on
    every rank, any strides, any head_dim, any library's arrays as in `treeattn.decode`.

    An lse of -inf, +inf or NaN marks a part that saw nothing, whatever its out holds: serving kernels write
    each of them. With `strict` only -inf does. A NaN in out beside a finite lse reaches the result.

    Returns out and lse of the whole, the same on every rank, lse in `base`: float32, float64 for float64 out;
    0 and -inf where no rank saw anything. `scheme`, `device`, `transport` and `executor` as in
    `treeattn.decode`, but for schemes that leave each rank a slice, and those that attend while they
    communicate: they are refused.

    Plans, merges once and tears down: in a loop keep a `Merger`. Raises, on every rank alike, `ArgumentError`
    (shapes, dtypes, settings that differ between ranks, with `strict` an lse of +inf or NaN),
    `ScheduleError`, `RestrictionError`, `BackendError` or `TransportError`.
    """
    comm = comm_.intracomm(comm)
    step: tuple[Any, ...] = ()

    def ask() -> Settings:
        nonlocal step
        where = devices.find(arrays.device_of("out", out) if device is None else device)
        step = where.view("out", out), where.view("lse", lse)
        shape = step[0].shape
        parts = Parts(shape[:-1], shape[-1] if shape else 0, dtype_name(step[0], dtype))
        parts.check(*step, where.lse_dtypes)
        return Settings(parts, _folding(scheme), base, bool(strict), where, transport, executor)

    with Merger.of(comm, ask) as merger:
        return arrays.give(merger(*step), out)


@dataclass(frozen=True, slots=True)
class Parts:
    """What must be the same of every rank's part."""

    lse_shape: tuple[int, ...]
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ArgumentError(f"dtype {self.dtype!r} is not supported: use one of {', '.join(DTYPES)}")
        for name, sizes, least in (("lse_shape", self.lse_shape, 0), ("head_dim", (self.head_dim,), 1)):
            if not all(isinstance(n, int | np.integer) and n >= least for n in sizes):
                raise ArgumentError(f"{name} {list(sizes)}: whole numbers, at least {least}, are needed")

    @property
    def record_dtype(self) -> np.dtype[Any]:
        """Of records and results."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    def check(self, out: Any, lse: Any, lse_dtypes: tuple[str, ...]) -> None:
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


@dataclass(frozen=True, slots=True)
class Settings:
    """What a rank asks for. All of it must be the same on every rank."""

    parts: Parts
    scheme: Selection
    base: str | int
    strict: bool
    device: Device
    transport: str | None
    executor: str | None

    @property
    def compared(self) -> dict[str, object]:
        """By the names that an error gives it."""
        return {
            "the shape or dtype of out and lse": self.parts,
            "scheme": self.scheme.text,
            f"the schedule {self.scheme.text}": self.scheme.digest,
            "base": self.base,
            "strict": self.strict,
            "device": self.device.name,
            "transport": transports.known(self.transport),
            "executor": executors.known(self.executor),
        }


class Merger:
    """A planned `merge`: everything that can be done once is done once. Creating it is collective.

    lse_shape: of lse; out has head_dim as one axis more, and `dtype`. The rest as in `merge`; `device` has to
    be said: here nothing is known of out. A call returns (out, lse) in the merger's own buffers, which hold
    until its next call; in the container of out, and where that cannot share memory that changes (JAX), as
    copies.
    """

    def __init__(
        self,
        comm: Intracomm | None = None,
        *,
        lse_shape: tuple[int, ...],
        head_dim: int,
        dtype: str = "float32",
        scheme: str | Schedule = "hierarchical",
        base: str | int = "e",
        strict: bool = False,
        device: str = "cpu",
        transport: str | None = None,
        executor: str | None = None,
    ) -> None:
        def ask() -> Settings:
            parts = Parts(tuple(lse_shape), head_dim, dtype)
            where = devices.find(device)
            return Settings(parts, _folding(scheme), base, bool(strict), where, transport, executor)

        self._plan(comm_.intracomm(comm), ask)

    @classmethod
    def of(cls, comm: Intracomm, ask: Callable[[], Settings]) -> Merger:
        """The merger of what `ask` returns on every rank alike. Collective."""
        merger = cls.__new__(cls)
        merger._plan(comm, ask)
        return merger

    def _plan(self, comm: Intracomm, ask: Callable[[], Settings]) -> None:
        with comm_.Agreement(comm) as agreed:
            settings = ask()
            waiting.limit()
            self._comm, self._device = comm, settings.device
            self.parts, self.scheme, self._strict = settings.parts, settings.scheme.text, settings.strict
            self._plan_memory(_natural_log(settings.base))
            agreed.equal = settings.compared
        operator = self._device.merge_operator(self.parts.head_dim, self.parts.record_dtype)
        self._reducer = plan_reducer(
            *(comm, self._device, settings.transport, settings.scheme),
            *(operator, self._records, settings.executor),
        )
        self.executor, self.fallback = self._reducer.executor, self._reducer.fallback

    def _plan_memory(self, natural_log: float) -> None:
        """Records, results, and the steps between them; finish sees each part as a sequence of its own."""
        shape, head_dim, dtype = self.parts.lse_shape, self.parts.head_dim, self.parts.record_dtype
        empty, count = self._device.memory.empty, math.prod(shape)
        self._records = empty((*shape, head_dim + partial.EXTRA), dtype)
        self.out, self.lse = empty((*shape, head_dim), dtype), empty(shape, dtype)
        self._pack = self._device.pack(self._records, natural_log)
        self._finish = self._device.finish(
            self._records.reshape(count, 1, 1, head_dim + partial.EXTRA),
            self.out.reshape(count, 1, 1, head_dim),
            self.lse.reshape(count, 1, 1),
        )
        self._scale = None if natural_log == 1 else self._device.scale(self.lse, 1 / natural_log)
        self._containers = arrays.Containers(self._device.view, (self.out, self.lse))

    def __call__(self, out: Any, lse: Any) -> tuple[Any, Any]:
        """Merge once: (out, lse), valid until the next call. Every rank must call.

        Raises `ArgumentError` for arrays that do not fit the plan, on one rank alone as a `Decoder` does;
        for what `strict` refuses on every rank, which it asks first.
        """
        out, lse = self._containers.take(out, lse, names=("out", "lse"))
        self.parts.check(out, lse, self._device.lse_dtypes)
        if self._strict:
            comm_.agree(self._comm, {}, _marked_otherwise(self._device.to_host(lse)))
        self._pack(out, lse)
        self._reducer()
        self._finish()
        if self._scale is not None:
            self._scale()
        return self._containers.give()

    def close(self) -> None:
        """Release communicator and requests. Collective."""
        self._reducer.close()

    def __enter__(self) -> Merger:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._reducer.__exit__(*exception)


def _natural_log(base: object) -> float:
    """ln(base). Raises `ArgumentError`."""
    if not isinstance(base, str | int) or base not in _NATURAL_LOG:
        raise ArgumentError(f"base {base!r} is unknown: use 'e' (torch, vLLM, SGLang) or 2 (FlashInfer)")
    return _NATURAL_LOG[base]


def _marked_otherwise(lse: Any) -> ArgumentError | None:
    """What `strict` says of an lse that is +inf or NaN."""
    found = np.argwhere(np.isnan(lse) | (lse == np.inf))
    if not len(found):
        return None
    return ArgumentError(
        f"lse is +inf or NaN in {len(found)} of {lse.size} places, first at {found[0].tolist()}: only -inf "
        "marks a part that saw nothing; without strict=True these count as such too"
    )


def _folding(scheme: str | Schedule) -> Selection:
    return folding(scheme, "merge folds finished parts and gives every rank all of the result")
