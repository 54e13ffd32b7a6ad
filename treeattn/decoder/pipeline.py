"""A step by groups of heads: while the records of one group travel, the next group is attended.

Heads have nothing to do with one another, so a step over some of them is a step of its own. What is gained
is the time that records travel while this rank has other heads to attend to; what it costs is the latency of
every round once for each group. Which is larger depends on context, payload and network: `Tried` lets the
first steps decide. All ranks have equal bits as ever; they are those of a whole step where a schedule folds
all records alike, and others where it cuts them into chunks, which then hold other heads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from treeattn.attention.shape import Shape
from treeattn.backends.device import Device
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.runtime.memory import Memory
from treeattn.collectives.runtime.reducer import Reducer, Sent
from treeattn.errors import StateError
from treeattn.partial import Array

#: Numbers of groups that ``groups="auto"`` tries, where the KV heads can be dealt out to them.
CANDIDATES = (1, 2, 4)

_TRIALS = 5  # steps of each number of groups; the fastest counts, since other programs only add time


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

    def __init__(self, groups: list[Group], memory: Memory) -> None:
        super().__init__(groups[0].reducer.name)
        self._groups, self._copy = groups, memory.copy
        self.certificate, self.executor = groups[0].reducer.certificate, groups[0].reducer.executor
        self._arrays: tuple[Any, ...] = ()
        self._views: list[tuple[Any, Any, Any]] = []

    @property
    def groups(self) -> int:
        return len(self._groups)

    @property
    def sent(self) -> list[tuple[int, int]] | Sent | None:  # type: ignore[override]
        told = [group.reducer.sent for group in self._groups]
        if isinstance(told[0], Sent):
            return Sent(None, sum(sent.bytes for sent in told if isinstance(sent, Sent)))
        if told[0] is None:
            return None
        return [message for sent in told if isinstance(sent, list) for message in sent]

    def waits_for(self) -> tuple[str, str]:
        """As the group whose turn it is does."""
        waiting = (group.reducer.waits_for() for group in self._groups if group.reducer.blocking)
        return next(waiting, super().waits_for())

    def take(self, q: Array, k: Array, v: Array, lengths: Any = None) -> None:
        """The arrays of the next step. Views of the same arrays are made once: attention knows them again."""
        super()._check()
        if not self._arrays or any(a is not b for a, b in zip(self._arrays, (q, k, v), strict=True)):
            self._views = [
                (q[:, :, group.heads], k[:, :, group.kv_heads], v[:, :, group.kv_heads])
                for group in self._groups
            ]
            self._arrays = q, k, v
        self._lengths = lengths

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


class Tried(Reducer):
    """Takes the number of groups whose steps were the fastest of the first ones, on the slowest rank.

    Steps are tried in turn, a few of each; ranks then compare once what they saw. Those in halves count, as
    other ranks may take them whole, but tell no time: what happens in between is not known here. For
    schedules that fold all records alike: the results are the same to the bit all along.
    """

    def __init__(self, pipelines: list[Pipeline], comm: Communicator) -> None:
        """comm: of the ranks, for one exchange; it is then this object's."""
        super().__init__(pipelines[0].name)
        self._pipelines, self._comm = pipelines, comm
        self.certificate, self.executor = pipelines[0].certificate, pipelines[0].executor
        self._left: Iterator[int] = iter([*range(len(pipelines))] * _TRIALS)
        self._seconds = np.full(len(pipelines), np.inf)
        self._chosen = pipelines[next(self._left)]

    @property
    def groups(self) -> int:
        return self._chosen.groups

    @property
    def sent(self) -> list[tuple[int, int]] | Sent | None:  # type: ignore[override]
        return self._chosen.sent

    def waits_for(self) -> tuple[str, str]:
        return self._chosen.waits_for()

    def take(self, q: Array, k: Array, v: Array, lengths: Any = None) -> None:
        super()._check()
        self._chosen.take(q, k, v, lengths)

    def _check(self) -> None:
        super()._check()
        self._chosen._check()

    def _begin(self) -> None:
        self._chosen.start()

    def _advance(self) -> bool:
        return self._chosen.test()

    def _complete(self) -> None:
        self._chosen.wait()
        self._go_on(np.inf)

    def _step(self) -> None:
        start = time.perf_counter()
        self._chosen()
        self._go_on(time.perf_counter() - start)

    def _go_on(self, spent: float) -> None:
        """To the next of them, after the same step on every rank."""
        if len(self._pipelines) == 1:
            return
        index = self._pipelines.index(self._chosen)
        self._seconds[index] = min(self._seconds[index], spent)
        following = next(self._left, None)
        if following is None:
            self._decide()
        else:
            self._chosen = self._pipelines[following]

    def _decide(self) -> None:
        slowest = np.max(self._comm.allgather(self._seconds), axis=0)
        self._chosen = self._pipelines[int(slowest.argmin())]
        self._close_others()

    def _close_others(self) -> None:
        for pipeline in self._pipelines:
            if pipeline is not self._chosen:
                pipeline.close()
        self._pipelines = [self._chosen]
        self._comm.free()

    def _release(self) -> None:
        if len(self._pipelines) > 1:
            self._close_others()
        self._chosen.close()

    def _abandon(self) -> None:
        for pipeline in self._pipelines:
            pipeline.__exit__(RuntimeError)
