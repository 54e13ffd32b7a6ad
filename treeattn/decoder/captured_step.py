"""A step of a decoder as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from treeattn.attention import arrays
from treeattn.backends.device import Device
from treeattn.collectives.runtime.reducer import Owner
from treeattn.decoder.plan import Plan
from treeattn.errors import ArgumentError, BackendError, RestrictionError, StateError, TransportError
from treeattn.mpi.communicators import collectively

if TYPE_CHECKING:
    from treeattn.collectives.runtime.cuda_graph import CudaGraph


class CapturedStep:
    """What `Decoder.capture` makes."""

    def __init__(
        self,
        captured: CudaGraph,
        give: Callable[[], tuple[Any, Any]],
        owners: tuple[Any, ...],
        look: Callable[[Any, dict[str, Any]], None] | None,
        in_order: Callable[[], object],
    ) -> None:
        self._captured, self._give, self._look, self._in_order = captured, give, look, in_order
        self._thread = Owner("this captured step")
        self._owners = owners  # of the memory that the graph works on: it knows addresses only
        in_order()
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
        seen = {"q_positions": q_positions, "positions": positions, "mask": mask, "begins": begins}
        seen["draft_positions"] = draft_positions
        self._in_order()
        if self._look is not None:
            self._look(lengths, seen)
        elif any(one is not None for one in (lengths, *seen.values())):
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
    seen: dict[str, Any],
    owner: object,
    in_order: Callable[[], object],
) -> CapturedStep:
    """A whole step of a plan as one graph. Collective.

    run: makes a step by a plan and arrays of the device. given: q, k, v and lengths. seen: what queries see,
    as `Plan.fill_tables` takes it. owner: of the plan, which has to live as long as the graph. in_order: what
    the plan's steps begin with. Raises as `Decoder.capture` says.
    """
    from treeattn.collectives.runtime.cuda_graph import CudaGraph  # loaded where there are GPUs

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
    results = plan.buffers.out, plan.buffers.lse
    containers = arrays.Containers(device.view, results, plan.buffers.given)
    q, k, v, lengths = given
    by_tables = plan.tables is not None or any(one is not None for one in seen.values())

    def taken() -> tuple[Plan, Callable[..., None] | None, tuple[Any, ...]]:
        captured, look, rest = plan, None, None
        if by_tables:
            captured = plan.with_tables()
            look = _filling(captured, k.shape[1], lengths, seen)
        else:
            rest = _on_device(device, lengths)
        query, keys, values = containers.take(q, k, v)
        device.check(request.shape, query, keys, values, rest)
        return captured, look, (query, keys, values, rest)

    captured, look, views = collectively(plan.comm, taken)
    graph = CudaGraph(stream, lambda: run(captured, *views))
    return CapturedStep(graph, containers.give, (owner, *given), look, in_order)


def _filling(
    plan: Plan, tokens: int, first_lengths: Any, first: dict[str, Any]
) -> Callable[[Any, dict[str, Any]], None]:
    """What fills the tables of this plan again, over as many tokens, by lengths and what else it is given
    then; what that leaves out is as it was first, and as it is now. It has filled them once."""
    attend: Any = plan.attend

    def fill(lengths: Any, seen: dict[str, Any]) -> None:
        brought = {name: one for name, one in seen.items() if one is not None}
        plan.fill_tables(tokens, first_lengths if lengths is None else lengths, **(first | brought))
        attend.refresh()

    fill(None, {})
    return fill


def _on_device(device: Device, lengths: Any) -> Any:
    """Lengths that a graph can read again: an array of the device, or None. Raises `ArgumentError`."""
    try:
        return None if lengths is None else device.view("lengths", lengths)
    except ArgumentError as error:
        raise ArgumentError(f"lengths of a captured step must be an int64 device array: {error}") from None
