"""The planned verb: everything that can be done once is done once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from treeattn import communicators
from treeattn.agreement import collectively
from treeattn.attention import arrays
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.pages import check_lengths
from treeattn.attention.shape import Shape, check_latent
from treeattn.attention.shard import CacheFormat, Shard
from treeattn.backends.device import Device
from treeattn.collectives.runtime.cuda_graph import CudaGraph
from treeattn.collectives.runtime.reducer import Sent
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.captured_step import CapturedStep
from treeattn.decoder.plan import Plan, plan, select
from treeattn.decoder.projection import Projection
from treeattn.decoder.reproducible import find
from treeattn.decoder.request import Reduction, Request
from treeattn.decoder.sight import Stated
from treeattn.errors import (
    ArgumentError,
    BackendError,
    RestrictionError,
    StateError,
    TransportError,
    TreeattnError,
)  # fmt: skip

if TYPE_CHECKING:
    from treeattn.collectives.runtime.communicator import Communicator, Given

__all__ = ["Decoder"]


class Decoder:
    """A planned `decode`: everything that can be done once is done once. Creating it is collective.

    Shapes and types are fixed here; the shard's tokens may change with every call (a growing cache is passed
    as a longer array, or as the same array with larger `lengths`).

    Parameters
    ----------
    comm, scheme, scale, rules, reproducible
        As for `decode`.
    heads, kv_heads, head_dim, batch, queries : int
        The shape of q, and the KV heads, of which heads is a multiple. A step may have fewer queries: their
        number is planned when it first comes, over the same communicator, with the bits of a decoder of so
        many.
    dtype : str
        Of q: "bfloat16", "float16", "float32", or on the CPU "float64".
    device : {"cpu", "cuda"}
        Where to compute; "cuda" is CuPy's current device.
    cache : CacheFormat, optional
        What is known of the cache: types and scales, pages, the width of values, positions.
    project : [heads, v_dim, out_dim], optional
        Maps each head's result, the same on every rank (device="cpu"): out is then [batch, queries, heads,
        out_dim]. The matrix is applied to what travels if that makes it shorter (out_dim < v_dim), else to
        the result, whose bits are then equal on ranks whose processors and BLAS libraries are alike.

    Attributes
    ----------
    schedule, certificate
        What was planned and proved; None where no schedule is run. `why` this schedule, of "auto".
    transport, executor : str
        How records travel, and what runs the schedule; `fallback`: why nothing faster does.
    heads : slice
        The query heads that out and lse cover: all of them unless ``output="heads"``, and none where
        ``output="root"`` gives this rank nothing.

    Raises
    ------
    ArgumentError, ScheduleError, RestrictionError, BackendError, TransportError
        On every rank alike.

    Notes
    -----
    `local`, `reduce` and `finish` are the three parts of a call, for those who overlap or time them. Where a
    ring computes while it communicates (`kv_ring`, `query_ring`), or a step goes by groups of heads, `local`
    only takes the arrays, and `reduce` does the work. `begin` returns while the reduction is under way, and
    `finish` then ends it.
    """

    def __init__(
        self,
        comm: Given = None,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        batch: int = 1,
        queries: int = 1,
        dtype: str = "bfloat16",
        scheme: str | Schedule | Reduction = "hierarchical",
        scale: float | None = None,
        rules: Rules | None = None,
        device: str = "cpu",
        cache: CacheFormat | None = None,
        project: Any = None,
        reproducible: str | None = None,
    ) -> None:
        held = CacheFormat() if cache is None else cache

        def ask(queries: int) -> Request:
            if not isinstance(held, CacheFormat):
                raise ArgumentError(f"cache must be a treeattn.CacheFormat, not {cache!r:.60}")
            if held.v_dim is not None and held.v_dim <= head_dim:
                check_latent(held.v_dim, head_dim, scale)
            how = Reduction.of(scheme)
            stored = held.dtype, held.k_scale, held.v_scale, held.v_dim or 0, held.page_size
            shape = Shape(batch, queries, heads, kv_heads, head_dim, dtype, *stored)
            return Request(
                shape,
                how,
                select(how.scheme),
                scale,
                find(device, reproducible, own.size),
                rules=Rules.of(rules, heads),
                reproducible=reproducible,
                stated=Stated(held.positions),
                project=None if project is None else Projection(project, shape),
            )

        own = communicators.intracomm(comm)
        if queries != 1:  # what is planned for fewer shares this
            self._kept = own.dup()
            own = self._kept.lent()
        try:
            self._adopt(own, plan(own, lambda: ask(queries)))
        except TreeattnError:
            self._give_back()
            raise
        self._ask = ask
        self._latent = held.v_dim is not None and held.v_dim <= head_dim

    _kept: Communicator | None = None
    _ask: Callable[[int], Request] | None = None

    @classmethod
    def of(cls, comm: Communicator, planned: Plan) -> Decoder:
        """The decoder of a plan."""
        decoder = cls.__new__(cls)
        decoder._adopt(comm, planned)
        return decoder

    def _adopt(self, comm: Communicator, planned: Plan) -> None:
        request, self._buffers = planned.request, planned.buffers
        self.shape, self.scale, self.scheme = request.shape, request.logit_scale, request.scheme.text
        self.schedule, self.transport, self.why = planned.schedule, planned.transport, planned.why
        self.certificate = planned.reducer.certificate
        self.executor, self.fallback = planned.reducer.executor, planned.reducer.fallback
        buffers = planned.buffers
        self.records, self._given_here = buffers.records, buffers.given
        self.heads = buffers.heads if buffers.given else slice(0, 0)
        results = buffers.out, buffers.lse
        self._results: tuple[Any, Any] = results if buffers.given else (None, None)
        self.out: Any = self._results[0]
        self.lse: Any = self._results[1]
        self._containers = arrays.Containers(request.device.view, results)
        self._native, self._foreign = type(buffers.out), False
        self._comm, self._device = comm, request.device
        self._attention, self._reducer, self._finish = planned.attention, planned.reducer, planned.finish
        self._folded, self._whole = planned.folded, planned.whole
        self._sight, self._tables, self._see = planned.sight, planned.tables, planned.see
        self._seeing = self._attention, self._whole
        self._plain, self._add_sinks = planned.tables is None, planned.add_sinks
        self._sliced = planned.buffers.sliced
        self._captured: list[CapturedStep] = []
        self._latent = False
        # Of a step in parts: "local", "begun", "folded", or the decoder of fewer queries that it is one of.
        self._stage: str | Decoder | None = None
        self._fewer: dict[int, Decoder] = {}
        self._latent_of: tuple[Any, Any] = (None, None)

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        lengths: Any = None,
        *,
        q_positions: Any = None,
        begins: Any = None,
        mask: Any = None,
    ) -> tuple[Any, Any]:
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
        positions = draft_positions = table = given = None
        if v is None or type(k) is Shard:
            given = k, v, lengths
            k, v, lengths, positions, table, draft_positions = self._opened(k, v, lengths)
        attention, whole, tables = self._attention, self._whole, None
        if not self._plain or mask is not None or draft_positions is not None or begins is not None:
            if fewer := self._for(q):
                seen = {"q_positions": q_positions, "begins": begins, "mask": mask}
                return fewer(q, *(given or [k, v, lengths]), **seen)
            looked = q_positions, positions, mask, draft_positions, begins
            attention, whole = self._look(k, lengths, table, *looked)
            tables, lengths = self._tables, None
        if self._stage is not None:
            self._check_ended()
        if whole is not None and table is None and whole(q, k, v, lengths):
            self._stage = None
            return self._results
        if tables is None and (fewer := self._for(q)):
            return fewer(q, *(given or [k, v, lengths]))
        return self._step(attention, q, k, v, lengths, table, tables)

    def _for(self, q: Any) -> Decoder | None:
        """The decoder of a step with fewer queries than planned, planned when their number first comes; None
        for all others. Collective then."""
        shape: tuple[int, ...] = getattr(q, "shape", ())
        if len(shape) != 4 or not 0 < shape[1] < self.shape.queries or self._ask is None:
            return None
        self._check_ended()
        self._stage, queries = None, int(shape[1])
        if queries not in self._fewer:
            ask = self._ask
            self._fewer[queries] = Decoder.of(self._comm, plan(self._comm, lambda: ask(queries)))
            self._fewer[queries]._latent = self._latent
        return self._fewer[queries]

    def _opened(self, k: Any, v: Any, lengths: Any) -> tuple[Any, ...]:
        """(k, v, lengths, positions, block_table, draft_positions) of a step with a shard, or without v."""
        if not isinstance(k, Shard):
            return k, self._first_channels(k), lengths, None, None, None
        shard = Shard.of(k, v, lengths)
        self.shape.check_shard(shard)
        values = self._first_channels(shard.k) if shard.v is None else shard.v
        return shard.k, values, shard.lengths, shard.positions, shard.block_table, shard.draft_positions

    def _step(
        self,
        attention: Any,
        q: Any,
        k: Any,
        v: Any,
        lengths: Any,
        block_table: Any = None,
        tables: MaskTables | None = None,
    ) -> tuple[Any, Any]:
        """The three parts."""
        self._attend(attention, q, k, v, lengths, block_table, tables)
        if self._folded is None:
            self.fold()
            self._finish()
        else:
            self._folded()
        self._stage = None
        return self._given()

    def local(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        lengths: Any = None,
        *,
        q_positions: Any = None,
        begins: Any = None,
        mask: Any = None,
    ) -> None:
        """This rank's partials, from its own tokens, into the records buffer. Arguments as for a call."""
        if fewer := self._for(q):
            fewer.local(q, k, v, lengths, q_positions=q_positions, begins=begins, mask=mask)
            self._stage = fewer
            return
        positions = draft_positions = table = None
        if v is None or isinstance(k, Shard):
            k, v, lengths, positions, table, draft_positions = self._opened(k, v, lengths)
        attention, tables = self._attention, None
        if not self._plain or mask is not None or draft_positions is not None or begins is not None:
            seen = q_positions, positions, mask, draft_positions, begins
            attention, _ = self._look(k, lengths, table, *seen)
            tables, lengths = self._tables, None
        self._attend(attention, q, k, v, lengths, table, tables)

    def _first_channels(self, k: Any) -> Any:
        """The values of latent attention, a view of k; the same one for the same array, which is bound."""
        if not self._latent:
            raise ArgumentError(
                "v is missing: pass it, or plan with cache=CacheFormat(v_dim=), how many channels of k it is"
            )
        if self._latent_of[0] is not k or type(k) is not self._native:
            self._latent_of = k, k[..., : self.shape.v_dim]
        return self._latent_of[1]

    def _tokens(self, k: Any, lengths: Any, block_table: Any) -> int:
        """How many there can be of a sequence."""
        page_size = self._page_size(block_table)
        if page_size is None:
            return k.shape[1] if len(k.shape) == 4 else 0
        pages = self._device.block_table(self.shape, block_table).shape[1]
        check_lengths(self._device.host_lengths(lengths), page_size, pages)
        return int(pages * page_size)

    def _page_size(self, block_table: Any) -> int | None:
        """As planned, which a step cannot change."""
        if (block_table is None) != (self.shape.page_size is None):
            raise ArgumentError(
                f"this decoder is planned with page_size={self.shape.page_size}: "
                + (
                    "pass Shard(block_table=)"
                    if block_table is None
                    else "plan with cache=CacheFormat(page_size=) for a block_table"
                )
            )
        return self.shape.page_size

    def _look(self, k: Any, lengths: Any, block_table: Any, *seen: Any) -> tuple[Any, Any]:
        """Fill the tables of a step; attention and whole step that read them."""
        tokens = self._tokens(k, lengths, block_table)
        if self._tables is None:  # a mask or begins, for the first time
            if self._see is None:
                how = "by groups of heads" if self.groups > 1 else f"of {self.scheme}"
                raise RestrictionError(
                    f"a step {how} lets every query see every token: it takes no mask and no begins"
                )
            tables = self._sight.tables()
            self._tables, self._seeing = tables, self._see(tables)
        lengths = self._device.host_lengths(lengths)
        self._sight.look(self._tables, tokens, lengths, *seen)
        return self._seeing

    def _attend(
        self,
        attention: Any,
        q: Any,
        k: Any,
        v: Any,
        lengths: Any,
        block_table: Any,
        tables: MaskTables | None,
    ) -> None:
        self._check_ended()
        self._stage = None
        self._foreign = not type(q) is type(k) is type(v) is self._native
        if self._foreign:
            q, k, v = self._containers.take(q, k, v)
        if self._page_size(block_table) is None:
            attention(q, k, v, self._device.admit(self.shape, q, k, v, lengths))
        else:
            given = lengths, block_table, tables
            attention(q, k, v, *self._device.admit_pages(self.shape, q, k, v, *given))
        if self._add_sinks is not None:
            self._add_sinks()
        self._stage = "local"

    def _check_ended(self) -> None:
        stage = self._stage._stage if isinstance(self._stage, Decoder) else self._stage
        if stage == "begun":
            raise StateError(f"{self.scheme}: begin() began a step, which finish() must end before another")

    def reduce(self) -> None:
        """Fold the partials of all ranks. Collective.

        Raises `StateError` unless `local` made partials that are not folded yet: folded twice, each rank
        would count as often as there are ranks.
        """
        if isinstance(self._stage, Decoder):
            self._stage.reduce()
            return
        if self._stage != "local":
            self._reducer._check()  # closed and failed ones say so
            raise StateError(f"{self.scheme}: reduce() without partials: local() comes before each reduce()")
        self.fold()

    def fold(self) -> None:
        """`reduce` of whatever `records` hold, for callers that wrote them. Collective."""
        self._stage = None
        if self._sliced:
            self._buffers.to_wire()
        self._reducer()
        if self._sliced:
            self._buffers.from_wire()
        self._stage = "folded"

    def begin(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        lengths: Any = None,
        *,
        q_positions: Any = None,
        begins: Any = None,
        mask: Any = None,
    ) -> None:
        """`local`, and the start of the reduction: other work may follow, then `finish`. All ranks call.
        Arguments as for a call.

        The arrays may be written again when this returns (a ring: after `finish`), on a GPU when its stream
        has come so far. Raises `StateError` where the last step that began is not finished.
        """
        if fewer := self._for(q):
            fewer.begin(q, k, v, lengths, q_positions=q_positions, begins=begins, mask=mask)
            self._stage = fewer
            return
        self.local(q, k, v, lengths, q_positions=q_positions, begins=begins, mask=mask)
        if self._sliced:
            self._buffers.to_wire()
        self._reducer.start()
        self._stage = "begun"

    def test(self) -> bool:
        """Go on with the reduction that `begin` began, without waiting; whether it is all there.

        Where the scheme can do nothing without waiting (rings) it never is. Raises `StateError` where no
        step has begun.
        """
        return self._stage.test() if isinstance(self._stage, Decoder) else self._reducer.test()

    def finish(self) -> tuple[Any, Any]:
        """(out, lse) from the folded records, in the container of the q that `local` was given; after `begin`
        the end of the reduction first.

        Raises `StateError` unless `reduce` or `begin` came before: a call finishes its own step.
        """
        if isinstance(self._stage, Decoder):
            return self._stage.finish()
        if self._stage == "begun":
            self._stage = None
            self._reducer.wait()
            if self._sliced:
                self._buffers.from_wire()
            self._stage = "folded"
        if self._stage != "folded":
            raise StateError(f"{self.scheme}: finish() without folded partials: reduce() comes before it")
        self._finish()
        return self._given()

    def _given(self) -> tuple[Any, Any]:
        return self._containers.give() if self._foreign and self._given_here else self._results

    @property
    def groups(self) -> int:
        """Of heads, in which the next step is taken apart: 1 where it is not."""
        return getattr(self._reducer, "groups", 1)

    @property
    def sent(self) -> list[tuple[int, int]] | Sent | None:
        """What this rank hands over in a step.

        (destination, bytes) of every message; the payload of a library's collectives; None where only the
        library knows.
        """
        return self._reducer.sent

    def capture(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        lengths: Any = None,
        *,
        q_positions: Any = None,
        begins: Any = None,
        mask: Any = None,
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
        if fewer := self._for(q):
            return fewer.capture(q, k, v, lengths, q_positions=q_positions, begins=begins, mask=mask)
        if self.shape.page_size is not None:
            raise RestrictionError("a captured step takes no block table: call the decoder of a paged cache")
        stream = self._device.stream
        if stream is None:
            raise BackendError("a captured step is a CUDA graph: it needs device='cuda'")
        if not self._reducer.stream_ordered:
            raise TransportError(
                f"transport={self.transport!r} moves records by the host, which a CUDA graph cannot: "
                "a captured step needs transport='nccl' or 'peer', or one rank without a transport"
            )

        containers = arrays.Containers(self._device.view, (self._buffers.out, self._buffers.lse))
        attention: Any = self._attention
        look: Callable[..., None] | None = None
        positions = draft_positions = None
        if v is None or isinstance(k, Shard):
            k, v, lengths, positions, _, draft_positions = self._opened(k, v, lengths)
        seen = q_positions, positions, mask, draft_positions, begins

        def taken() -> tuple[Any, ...]:
            nonlocal attention, look
            rest = None
            if not self._plain or any(one is not None for one in seen):
                attention, look = self._tables_of_its_own(k.shape[1], lengths, *seen)
            else:
                rest = _on_device(self._device, lengths)
            views = *containers.take(q, k, v), rest
            self._device.admit(self.shape, *views)
            return views

        views = collectively(self._comm, taken)
        captured = CudaGraph(stream, lambda: self._step(attention, *views))
        give = containers.give if self._given_here else lambda: self._results
        step = CapturedStep(captured, give, (self, q, k, v, lengths), look)
        self._captured.append(step)
        return step

    def _tables_of_its_own(self, tokens: int, *first: Any) -> tuple[Any, Callable[..., None]]:
        """Attention by tables that no other step fills, and what fills them again over as many tokens: with
        lengths and what else it is given then, and with `first`, as it is then, in place of None."""
        assert self._see is not None  # the device has a stream
        tables = self._sight.tables()
        attention: Any = self._see(tables)[0]

        def look(*given: Any) -> None:
            lengths, *seen = (old if new is None else new for old, new in zip(first, given, strict=True))
            self._sight.look(tables, tokens, self._device.host_lengths(lengths), *seen)
            attention.refresh()

        look(*first)
        return attention, look

    def synchronize(self) -> None:
        """Wait for the steps that were queued to a GPU; without one they are done when they return.

        Over NCCL at most ``TREEATTN_TIMEOUT`` seconds, where CuPy's own waits have no end if a rank does not
        take part: then it raises `TransportError`, and the decoder is at its end. With ``transport="peer"``
        the steps end by themselves, and the error says that one of them has no result.
        """
        self._reducer.synchronize()
        self._device.memory.synchronize()

    def close(self) -> None:
        """Release communicator and requests. Collective."""
        self._drop_captured()
        while self._fewer:
            self._fewer.popitem()[1].close()
        self._reducer.close()
        self._give_back()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *exception: Any) -> None:
        if exception and exception[0] is None:
            self.close()
            return
        self._drop_captured()
        for fewer in self._fewer.values():
            fewer.__exit__(*exception)
        self._reducer.__exit__(*exception)

    def _give_back(self) -> None:
        """The communicator of a decoder that may plan for fewer queries. Collective."""
        if self._kept is not None:
            self._kept.free()
            self._kept = None

    def _drop_captured(self) -> None:
        """Graphs go before the communicator that they use."""
        while self._captured:
            self._captured.pop().drop()


def _on_device(device: Device, lengths: Any) -> Any:
    """Lengths that a graph can read again: an array of the device, or None. Raises `ArgumentError`."""
    try:
        return None if lengths is None else device.view("lengths", lengths)
    except ArgumentError as error:
        raise ArgumentError(f"lengths of a captured step must be an int64 device array: {error}") from None
