"""What a plan runs: steps, whole or in their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from numpy.typing import ArrayLike

from treeattn.attention import arrays
from treeattn.attention.arguments import BlockTable, Shard
from treeattn.attention.arrays import AnyArray
from treeattn.attention.pages import check_lengths
from treeattn.attention.positions import as_runs
from treeattn.collectives.runtime.memory import StreamOrder
from treeattn.collectives.runtime.reducer import Owner, Sent
from treeattn.decoder import captured_step
from treeattn.decoder.captured_step import CapturedStep
from treeattn.decoder.mask_plan import check_blocks
from treeattn.decoder.plan import Plan
from treeattn.decoder.request import refuse
from treeattn.errors import ArgumentError, StateError
from treeattn.mpi.communicators import collectively
from treeattn.partial import Array

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from treeattn.backends.device import Attention, WholeStep

#: One step: the plan that it follows, (q, k, v, lengths), and a block table.
StepArguments: TypeAlias = tuple[Plan, tuple[Any, Any, Any, ArrayLike | None], BlockTable | None]


class MaskArguments(TypedDict, total=False):
    """What decides what the queries of a step see, as a call takes it."""

    q_positions: ArrayLike | None
    begins: ArrayLike | None
    mask: Array | None


class PlannedDecode:
    """The steps of a `Plan`. It owns the plan's reducer. `Decoder` is this with arguments of its own."""

    shape = property(attrgetter("plan.request.shape"))
    scale = property(attrgetter("plan.request.logit_scale"))
    scheme = property(attrgetter("plan.request.scheme.text"))
    schedule = property(attrgetter("plan.schedule"))
    transport = property(attrgetter("plan.transport"))
    certificate = property(attrgetter("plan.reducer.certificate"))
    executor = property(attrgetter("plan.reducer.executor"))
    fallback = property(attrgetter("plan.reducer.fallback"))
    records = property(attrgetter("plan.buffers.records"))
    _device = property(attrgetter("plan.request.device"))
    _reducer = property(attrgetter("plan.reducer"))

    def __init__(self, plan: Plan, *, latent: bool = False) -> None:
        """latent: whether a step may leave v out, as the first channels of k."""
        self.plan, self._latent, self.owner = plan, latent, Owner("this decoder")
        self._place = f"rank {plan.comm.rank} of {plan.comm.size}"  # which closing may free
        stream, results = self._device.stream, (plan.buffers.out, plan.buffers.lse)
        self._containers = arrays.Containers(self._device.view, results, plan.buffers.given)
        self.out, self.lse = self._results = self._containers.results
        self._in_order: Callable[[], object] = tuple if stream is None else StreamOrder(stream)
        # What a step with a mask follows, from the first one on.
        self._masked = plan if plan.tables is not None else None
        self._stage: Literal["local", "begun", "folded"] | None = None  # how far a step in parts is
        self._values: tuple[Any, Any] = (None, None)
        self._captured: list[CapturedStep] = []

    @functools.cached_property
    def _whole(self) -> WholeStep | None:
        """A step of arrays alone, tried first."""
        return self.plan.fused_step if self.plan.tables is None else None

    def __repr__(self) -> str:
        buffers = self.plan.buffers
        arrays_ = (buffers.records, buffers.wire, buffers.own, buffers.out, buffers.lse)
        held = sum({id(array): array.nbytes for array in arrays_}.values())
        return f"<Decoder: {self.scheme}, {self._place}, {held:,} bytes held>"

    @property
    def heads(self) -> slice:
        """The query heads that out and lse cover: all of them unless ``output="heads"``, and none where
        ``output="root"`` gives this rank nothing."""
        return self.plan.buffers.heads if self.plan.buffers.given else slice(0, 0)

    def __call__(
        self,
        q: AnyArray,
        k: AnyArray | Shard,
        v: AnyArray | None = None,
        lengths: ArrayLike | None = None,
        *,
        q_positions: ArrayLike | None = None,
        begins: ArrayLike | None = None,
        mask: Array | None = None,
    ) -> tuple[Array, Array]:
        """One step. Every rank must call.

        Parameters
        ----------
        q, k, v, lengths, mask
            As for `decode`, and as planned; k may be a `Shard`. They are looked at on their own rank alone.
        q_positions
            As for `decode`, the same on every rank; needed where a rule asks where queries stand.
        begins
            As for `decode`, the same on every rank; positions must be known, by plan or of the `Shard`.

        Returns
        -------
        out, lse
            As `decode` gives them (None where ``output="root"`` gives this rank nothing), in the decoder's
            own buffers, which hold until its next call; as copies in the container of q where that cannot
            share memory that changes (JAX).

        Raises
        ------
        ArgumentError
            Arrays that do not fit the plan; on one rank alone, since a step that agreed first would cost as
            much as the reduction: let it end the job (python -m mpi4py).
        """
        if get_ident() != self.owner.thread:
            self.owner.take()
        if self._stage is not None:
            self._begin_anew()
        self._in_order()
        if self._whole is not None and mask is None and begins is None and self._whole(q, k, v, lengths):
            return self._results
        step = self._prepare(q, k, v, lengths, q_positions=q_positions, begins=begins, mask=mask)
        plan, taken, table = step
        if table is None and plan.fused_step is not None and plan.fused_step(*taken):
            return self._containers.give()
        return self._in_parts(step)

    def _begin_anew(self) -> None:
        """Check before a step that the last one has ended."""
        if self._stage == "begun":
            raise StateError(f"{self.scheme}: begin() began a step, which finish() must end before another")
        self._stage = None

    def _prepare(
        self,
        q: AnyArray,
        k: AnyArray | Shard,
        v: AnyArray | None,
        lengths: ArrayLike | None,
        **seen: Unpack[MaskArguments],
    ) -> StepArguments:
        """A step over these arrays, with the tables of what queries see filled. Raises `ArgumentError`."""
        k, v, lengths, table, positions = self._unpack(k, v, lengths)
        q, k, v = self._containers.take(q, k, v)
        if (table is None) != (self.shape.page_size is None):
            plan = "plan with cache=CacheFormat(page_size=) for a block_table"
            remedy = "pass Shard(block_table=)" if table is None else plan
            raise ArgumentError(f"this decoder is planned with page_size={self.shape.page_size}: {remedy}")
        named = {"mask": None, "begins": None, "draft_positions": None, **seen, **positions}
        if self.plan.tables is None and named["mask"] is named["begins"] is named["draft_positions"] is None:
            return self.plan, (q, k, v, lengths), table
        return self._update_mask(k, lengths, table, named), (q, k, v, None), table

    def _unpack(
        self, k: AnyArray | Shard, v: AnyArray | None, lengths: ArrayLike | None
    ) -> tuple[AnyArray, AnyArray, ArrayLike | None, BlockTable | None, dict[str, Any]]:
        """k, v, lengths, block table, and what else a `Shard` says of positions, by name. Raises `StateError`
        where this decoder is closed."""
        if self._reducer._closed:
            self._reducer._check()  # it says so
        table, positions = None, dict[str, Any]()
        if isinstance(k, Shard):
            shard = Shard.of(k, v, lengths)
            self.shape.check_shard(shard)
            k, v, lengths, table = shard.k, shard.v, shard.lengths, shard.block_table
            positions = {"positions": shard.positions, "draft_positions": shard.draft_positions}
            if shard.positions is not None and self.plan.request.reproducible == "blocks":
                check_blocks(as_runs(shard.positions), self.plan.comm.size)
        return k, self._first_channels(k) if v is None else v, lengths, table, positions

    def _first_channels(self, k: Any) -> Array:
        """The values of latent attention, a view of k; the same one for the same array, which is bound."""
        if not self._latent:
            raise ArgumentError(
                "v is missing: pass it, or plan with cache=CacheFormat(v_dim=), how many channels of k it is"
            )
        if self._values[0] is not k or type(k) is not type(self.records):
            self._values = k, k[..., : self.shape.v_dim]
        values: Array = self._values[1]
        return values

    def _update_mask(
        self, k: AnyArray, lengths: ArrayLike | None, table: BlockTable | None, seen: dict[str, Any]
    ) -> Plan:
        """The plan of a step with a mask, whose tables are filled."""
        if self._masked is None:
            drafts = seen.get("mask") is not None or seen["draft_positions"] is not None
            brought = {"mask": drafts and "mask", "begins": seen.get("begins") is not None and "begins"}
            refuse(self.plan.request.properties | brought)
            self._masked = self.plan.with_tables()
        tokens, page_size = k.shape[1] if len(k.shape) == 4 else 0, self.shape.page_size
        if page_size is not None:
            pages = self._device.block_table(self.shape, table).shape[1]
            check_lengths(self._device.host_lengths(lengths), page_size, pages)
            tokens = pages * page_size
        self._masked.fill_tables(tokens, lengths, **seen)
        return self._masked

    def _in_parts(self, step: StepArguments) -> tuple[Array, Array]:
        whole = step[0].fused_step
        run = None if whole is None else whole.run
        self._attend(step, run)
        if run is None:
            self._reduce()
            self.plan.finish()
        return self._containers.give()

    def _attend(self, step: StepArguments, attend: Attention | None = None) -> None:
        """attend: in place of the plan's."""
        plan, (q, k, v, lengths), table = step
        given = self._device.check(self.shape, q, k, v, lengths, table, plan.tables)
        (attend or plan.attend)(q, k, v, *given)
        if plan.add_sinks is not None:
            plan.add_sinks()

    def _reduce(self) -> None:
        self.plan.buffers.to_wire()
        self.plan.reducer()
        self.plan.buffers.from_wire()

    def local(
        self,
        q: AnyArray,
        k: AnyArray | Shard,
        v: AnyArray | None = None,
        lengths: ArrayLike | None = None,
        **seen: Unpack[MaskArguments],
    ) -> None:
        """This rank's partials, from its own tokens, into the records buffer. Arguments as for a call."""
        self.owner.take()
        self._begin_anew()
        self._in_order()
        self._attend(self._prepare(q, k, v, lengths, **seen))
        self._stage = "local"

    def reduce(self) -> None:
        """Fold the partials of all ranks. Collective.

        Raises `StateError` unless `local` made partials that are not folded yet: folded twice, each rank
        would count as often as there are ranks.
        """
        if self._stage != "local":
            self._reducer._check()  # closed and failed ones say so
            raise StateError(f"{self.scheme}: reduce() without partials: local() comes before each reduce()")
        self.fold()

    def fold(self) -> None:
        """`reduce` of whatever `records` hold, for callers that wrote them. Collective."""
        self.owner.take()
        self._stage = None
        self._in_order()
        self._reduce()
        self._stage = "folded"

    def begin(
        self,
        q: AnyArray,
        k: AnyArray | Shard,
        v: AnyArray | None = None,
        lengths: ArrayLike | None = None,
        **seen: Unpack[MaskArguments],
    ) -> None:
        """`local`, and the start of the reduction: other work may follow, then `finish`. All ranks call.
        Arguments as for a call.

        The arrays may be written again when this returns (a ring: after `finish`), on a GPU when its stream
        has come so far. Raises `StateError` where the last step that began is not finished.
        """
        self.local(q, k, v, lengths, **seen)
        self.plan.buffers.to_wire()
        self.plan.reducer.start()
        self._stage = "begun"

    def test(self) -> bool:
        """Go on with the reduction that `begin` began, without waiting; whether it is all there.

        Where the scheme can do nothing without waiting (rings) it never is. Raises `StateError` where no
        step has begun.
        """
        self.owner.take()
        return self.plan.reducer.test()

    def finish(self) -> tuple[Array, Array]:
        """(out, lse) from the folded records, in the container of the q that `local` was given; after `begin`
        the end of the reduction first.

        Raises `StateError` unless `reduce` or `begin` came before: a call finishes its own step.
        """
        self.owner.take()
        self._in_order()
        if self._stage == "begun":
            self._stage = None
            self.plan.reducer.wait()
            self.plan.buffers.from_wire()
            self._stage = "folded"
        if self._stage != "folded":
            raise StateError(f"{self.scheme}: finish() without folded partials: reduce() comes before it")
        self.plan.finish()
        return self._containers.give()

    @property
    def sent(self) -> Sent:
        """What this rank hands over in a step.

        (destination, bytes) of every message; the bytes of a library's collectives; None where only the
        library knows.
        """
        return self.plan.reducer.sent

    def capture(
        self,
        q: AnyArray,
        k: AnyArray | Shard,
        v: AnyArray | None = None,
        lengths: ArrayLike | None = None,
        **seen: Unpack[MaskArguments],
    ) -> CapturedStep:
        """The whole step over arrays that stay where they are, as one CUDA graph. Collective.

        Runs one step, then records one. Calling the result is one launch on the current stream and gives
        (out, lse) as a call of the decoder does; it reads what q, k, v and lengths (an int64 device array,
        or None for all) hold then, so a cache may grow within them. Every rank must call it in the same step:
        NCCL allows a captured step on all ranks or on none. It ends with the decoder.

        Where rules are planned, or a mask is passed, lengths and the rest are as for a call: what queries see
        is found anew by each call of the result, which takes them too.

        Raises `BackendError` unless ``device="cuda"``, `TransportError` where the host moves the records.
        """
        self.owner.take()
        self._begin_anew()
        k, v, lengths, _, positions = collectively(self.plan.comm, lambda: self._unpack(k, v, lengths))
        step = captured_step.capture(
            self.plan,
            lambda plan, *taken: self._in_parts((plan, taken, None)),
            given=(q, k, v, lengths),
            seen={**seen, **positions},
            owner=self,
            in_order=self._in_order,
        )
        self._captured.append(step)
        return step

    def synchronize(self) -> None:
        """Wait for the steps that were queued to a GPU; without one they are done when they return.

        Over NCCL at most ``TREEATTN_TIMEOUT`` seconds, where CuPy's own waits have no end if a rank does not
        take part: then it raises `TransportError`, and the decoder is at its end. With ``transport="peer"``
        the steps end by themselves, and the error says that one of them has no result.
        """
        self._in_order()  # they may be in another stream than the current one
        self._reducer.synchronize()
        self._device.memory.synchronize()

    def close(self) -> None:
        """Release communicator and requests. Collective."""
        self.owner.check()
        self._drop_captured()
        self._reducer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception and exception[0] is None:
            self.close()
        else:  # the end of this rank alone
            self._drop_captured()
            self._reducer.__exit__(*exception)

    def _drop_captured(self) -> None:
        """Graphs go before the communicator that they use."""
        while self._captured:
            self._captured.pop().drop()
