"""A step by groups of heads: while the records of one group travel, the next group is attended.

Heads have nothing to do with one another, so a step over some of them is a step of its own. What is gained
is the time that records travel while this rank has other heads to attend to; what it costs is the latency of
every round once for each group. Which is larger depends on context, payload and network. All ranks have equal
bits as ever; they are those of a whole step where a schedule folds all records alike, and others where it
cuts them into chunks, which then hold other heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from treeattn.attention.shape import Shape
from treeattn.backends.device import Device
from treeattn.collectives.runtime.memory import Memory
from treeattn.collectives.runtime.reducer import Reducer, Sent
from treeattn.errors import StateError
from treeattn.partial import Array


class Group(NamedTuple):
    """Neighbouring heads.

    `records` [batch, heads of the group, queries, head_dim + 2] are where `attend` writes, which takes q, k
    and v of these heads and lengths, and what `reducer` folds; `whole` is their place among all.
    """

    heads: slice
    kv_heads: slice
    records: Array
    whole: Array
    attend: Callable[[Any, Any, Any, Any], None]
    reducer: Reducer


def split(
    count: int, shape: Shape, scale: float, records: Array, device: Device, reduce: Callable[[Any], Reducer]
) -> list[Group]:
    """`count` groups of the heads of `records` [batch, heads, queries, head_dim + 2].

    reduce: plans the reduction of the C-contiguous records that it is given. Collective.
    """
    own = replace(shape, heads=shape.heads // count, kv_heads=shape.kv_heads // count)
    groups = []
    for index in range(count):
        heads, kv_heads = (slice(index * n, (index + 1) * n) for n in (own.heads, own.kv_heads))
        whole = part = records[:, heads]
        if not part.flags.c_contiguous:
            part = device.memory.empty(part.shape, part.dtype)
        attend = device.attention(own, part, scale)
        groups.append(Group(heads, kv_heads, part, whole, attend, reduce(part)))
    return groups


class Pipeline(Reducer):
    """Attends to its groups one after the other and reduces each as soon as it has been attended.

    `take` names the arrays of the next step; all else happens there, as in a ring.
    """

    def __init__(self, groups: list[Group], shape: Shape, memory: Memory) -> None:
        super().__init__(groups[0].reducer.name)
        self._groups, self._shape, self._copy = groups, shape, memory.copy
        self.certificate, self.executor = groups[0].reducer.certificate, groups[0].reducer.executor
        self._arrays: tuple[Any, ...] = ()
        self._views: list[tuple[Any, Any, Any]] = []

    @property
    def sent(self) -> Sent:  # type: ignore[override]
        of_groups = [group.reducer.sent for group in self._groups]
        if isinstance(of_groups[0], list):
            return [message for sent in of_groups if isinstance(sent, list) for message in sent]
        return None if of_groups[0] is None else sum(sent for sent in of_groups if isinstance(sent, int))

    def waits_for(self) -> tuple[str, str]:
        """As the group whose turn it is does."""
        waiting = (group.reducer.waits_for() for group in self._groups if group.reducer.blocking)
        return next(waiting, super().waits_for())

    def take(self, q: Array, k: Array, v: Array, lengths: Any = None) -> None:
        """The arrays of the next step. Views of the same arrays are made once: attention knows them again."""
        super()._check()
        self._lengths = None if lengths is None else self._shape.check_lengths(lengths, k.shape[1])
        if not self._arrays or any(a is not b for a, b in zip(self._arrays, (q, k, v), strict=True)):
            self._views = [
                (q[:, :, group.heads], k[:, :, group.kv_heads], v[:, :, group.kv_heads])
                for group in self._groups
            ]
            self._arrays = q, k, v

    def _check(self) -> None:
        super()._check()
        if not self._arrays:
            raise StateError(f"{self.name}: a step without arrays: local() comes before reduce()")

    def _begin(self) -> None:
        """Attend to all groups, each of which then travels; those before it are looked after in between."""
        for index, (group, views) in enumerate(zip(self._groups, self._views, strict=True)):
            group.attend(*views, self._lengths)
            group.reducer.start()
            for earlier in self._groups[:index]:
                earlier.reducer.test()

    def _advance(self) -> bool:
        arrived = [group.reducer.test() for group in self._groups]  # every one is looked after
        return all(arrived)

    def _complete(self) -> None:
        for group in self._groups:
            group.reducer.wait()
            if group.records is not group.whole:
                self._copy(group.whole, group.records)

    def _release(self) -> None:
        for group in self._groups:
            group.reducer.close()

    def _abandon(self) -> None:
        for group in self._groups:
            group.reducer.__exit__(RuntimeError)
