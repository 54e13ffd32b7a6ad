"""A step of a decoder as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treeattn.attention import arrays
from treeattn.backends.device import Device
from treeattn.collectives.runtime.cuda_graph import CudaGraph
from treeattn.collectives.runtime.reducer import Owner
from treeattn.decoder.plan import Plan
from treeattn.errors import ArgumentError, BackendError, RestrictionError, StateError, TransportError
from treeattn.mpi.agreement import collectively


class CapturedStep:
    """What `Decoder.capture` makes."""

    def __init__(
        self,
        captured: CudaGraph,
        give: Callable[[], tuple[Any, Any]],
        owners: tuple[Any, ...],
        look: Callable[..., None] | None,
        in_order: Callable[[], object],
    ) -> None:
        self._captured, self._give, self._look, self._in_order = captured, give, look, in_order
        self._thread = Owner("this captured step")
        self._owners = owners  # of the memory that the graph works on: it knows addresses only
        captured()
        captured.record()

    def __call__(
        self,
        lengths: Any = None,
        *,
        q_positions: Any = None,
        positions: Any = None,
        mask: Any = None,
        draft_positions: Any = None,
        begins: Any = None,
    ) -> tuple[Any, Any]:
        """One launch: (out, lse), valid until the decoder's next step.

        Of a step that was captured with rules, a mask or begins: lengths, q_positions, positions, mask,
        draft_positions and begins as for a call of the decoder; those left out are the arrays of the
        capture, as they are now. What changed is copied to the GPU before the launch, which keeps the number
        of splits that the capture had: capture with about as many visible tokens as are to come. Raises
        `ArgumentError`.
        """
        self._thread.take()
        if not self._owners:
            raise StateError("the decoder of this captured step is closed")
        given = lengths, q_positions, positions, mask, draft_positions, begins
        self._in_order()
        if self._look is not None:
            self._look(*given)
        elif any(one is not None for one in given):
            raise ArgumentError(
                "this step was captured without rules, mask or begins: it sees all, by the lengths in the "
                "array of the capture; pass what queries see to capture(), and change lengths in place"
            )
        self._captured()
        return self._give()

    def drop(self) -> None:
        self._captured.drop()
        self._owners = ()


def capture(
    plan: Plan,
    run: Callable[..., object],
    *,
    given: tuple[Any, Any, Any, Any],
    seen: tuple[Any, ...],
    owner: object,
    in_order: Callable[[], object],
) -> CapturedStep:
    """A whole step of a plan as one graph. Collective.

    run: makes a step by an attention and arrays of the device. given: q, k, v and lengths. seen: q_positions,
    positions, mask, draft_positions and begins. owner: of the plan, which has to live as long as the graph.
    in_order: what the plan's steps begin with. Raises as `Decoder.capture` says.
    """
    request = plan.request
    device, stream = request.device, request.device.stream
    if request.shape.page_size is not None:
        raise RestrictionError("a captured step takes no block table: call the decoder of a paged cache")
    if stream is None:
        raise BackendError("a captured step is a CUDA graph: it needs device='cuda'")
    if not plan.reducer.stream_ordered:
        raise TransportError(
            f"transport={plan.transport!r} moves records by the host, which a CUDA graph cannot: "
            "a captured step needs transport='nccl' or 'peer', or one rank without a transport"
        )
    containers = arrays.Containers(device.view, (plan.buffers.out, plan.buffers.lse))
    attend: Any = plan.attend
    look: Callable[..., None] | None = None
    q, k, v, lengths = given

    def taken() -> tuple[Any, ...]:
        nonlocal attend, look
        rest = None
        if plan.tables is not None or any(one is not None for one in seen):
            attend, look = _tables_of_its_own(plan, k.shape[1], lengths, *seen)
        else:
            rest = _on_device(device, lengths)
        query, keys, values = containers.take(q, k, v)
        device.check(request.shape, query, keys, values, rest)
        return query, keys, values, rest

    views = collectively(plan.comm, taken)
    captured = CudaGraph(stream, lambda: run(attend, *views))
    give = containers.give if plan.buffers.given else lambda: (None, None)
    return CapturedStep(captured, give, (owner, *given), look, in_order)


def _tables_of_its_own(plan: Plan, tokens: int, *first: Any) -> tuple[Any, Callable[..., None]]:
    """Attention by tables that no other step fills, and what fills them again over as many tokens: with
    lengths and what else it is given then, and with `first`, as it is then, in place of None."""
    assert plan.replan_for_mask is not None  # the device has a stream
    tables = plan.mask.tables()
    attend: Any = plan.replan_for_mask(tables)[0]

    def look(*given: Any) -> None:
        lengths, *seen = (old if new is None else new for old, new in zip(first, given, strict=True))
        plan.mask.update(tables, tokens, plan.request.device.host_lengths(lengths), *seen)
        attend.refresh()

    look(*first)
    return attend, look


def _on_device(device: Device, lengths: Any) -> Any:
    """Lengths that a graph can read again: an array of the device, or None. Raises `ArgumentError`."""
    try:
        return None if lengths is None else device.view("lengths", lengths)
    except ArgumentError as error:
        raise ArgumentError(f"lengths of a captured step must be an int64 device array: {error}") from None
