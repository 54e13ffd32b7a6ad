"""All ranks of an NCCL job in one process: streams that run as those of GPUs would, and say why they hang.

Ranks queue work to their streams; `Fabric.run` executes all of them. A group of messages is done when every
one of its messages has met its counterpart, which must be in the group that its peer has come to; until
then nothing behind it runs. Messages that can move do so in random order.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from treeattn.collectives.runtime import nccl


def connected_by(monkeypatch: Any, kind: type[Any]) -> list[Any]:
    """NCCL is there, and its communicators are of this kind; the list of what was connected."""
    made: list[Any] = []
    monkeypatch.setattr(nccl, "problem", lambda: None)
    monkeypatch.setattr(nccl, "version", lambda: (2, 30))
    monkeypatch.setattr(nccl, "connect", lambda *given: made.append(kind(*given)) or made[-1])
    return made


class Hang(Exception):
    """What would hang on GPUs, or be undefined."""


class Post(NamedTuple):
    """One message: kind "send" or "receive"."""

    kind: str
    array: Any
    peer: int


class Group:
    """Posts that happen at the same time; `captured`: as a part of a CUDA graph."""

    def __init__(self, posts: list[Post], captured: bool) -> None:
        self.waiting = list(posts)
        self.captured = captured


class Fabric:
    """The GPUs and what connects them."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.streams = [Stream(self, rank) for rank in range(size)]
        self._random = np.random.default_rng(seed)

    def run(self) -> None:
        """Execute what all ranks have queued. Raises `Hang`."""
        while any(stream.queued for stream in self.streams):
            moved = [stream.run_to_a_group() for stream in self.streams]
            if not (self._exchange() or any(moved)):
                left = [stream for stream in self.streams if stream.queued]
                raise Hang({one.rank: [(post.kind, post.peer) for post in one.group.waiting] for one in left})

    def _exchange(self) -> bool:
        """Move every message whose two ends are posted."""
        moved = False
        for pair in self._random.permutation(self.size**2):
            src, dst = divmod(int(pair), self.size)
            moved |= self._move(self.streams[src], self.streams[dst])
        return moved

    def _move(self, sender: Stream, receiver: Stream) -> bool:
        out, into = sender.first("send", receiver.rank), receiver.first("receive", sender.rank)
        if out is None or into is None:
            return False
        if out.array.size != into.array.size:
            sizes = f"sends {out.array.size} elements, rank {receiver.rank} takes {into.array.size}"
            raise Hang(f"rank {sender.rank} {sizes}")
        if sender.group.captured != receiver.group.captured:
            raise Hang(f"captured on one side only: {sender.rank} to {receiver.rank}")
        into.array[...] = out.array.reshape(into.array.shape)
        sender.met(out)
        receiver.met(into)
        return True


class Stream:
    """One rank's stream, its communicator and its memory: see `collectives.runtime.memory.Stream`."""

    stream = 0

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.rank, self.size = rank, fabric.size
        self.queued: deque[Any] = deque()
        self.graph_launches = 0
        self.closed: str | None = None
        self.waited = True
        self.lost = False
        self._graphs: list[weakref.ref[Any]] = []
        self._recorded: list[Callable[[bool], Any]] | None = None

    # Memory and stream

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.full(shape, np.nan, dtype)

    def copy(self, into: Any, source: Any) -> None:
        self.queue(partial(np.copyto, into, source))

    def address(self, array: Any) -> int:
        return array.ctypes.data

    def synchronize(self) -> None:
        assert not self.queued, "nobody will ever run what is waited for"
        self.waited = True

    def done(self) -> bool:
        if not self.queued:
            self.waited = True
        return not self.queued

    def synchronize_all(self) -> None:
        self.synchronize()

    def capturing(self) -> bool:
        return self._recorded is not None

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        self._recorded = recorded = []
        run()
        self._recorded = None

        launch = partial(self._launch, recorded)  # no frame of a traceback holds it, as with CuPy's
        self._graphs.append(weakref.ref(launch))
        return launch

    def _launch(self, recorded: list[Callable[[bool], Any]]) -> None:
        if self.lost:
            raise RuntimeError("the GPU is lost")
        self.graph_launches += 1
        self.waited = False
        self.queued.extend(make(True) for make in recorded)

    def queue(self, work: Callable[[], object]) -> None:
        self._add(lambda captured: work)

    def _add(self, make: Callable[[bool], Any]) -> None:
        if self._recorded is None:
            self.waited = False
            self.queued.append(make(False))
        else:
            self._recorded.append(make)

    # Communicator

    def exchange(self, receives: Any, sends: Any) -> None:
        posts = [Post("receive", *one) for one in receives] + [Post("send", *one) for one in sends]
        for _, array, peer in posts:
            assert array.flags.c_contiguous
            assert array.size
            assert 0 <= peer < self.size
        self._add(partial(Group, posts))

    def check(self) -> None:
        """Nothing broke."""

    # NCCL's commDestroySync returns when every graph is gone: what would hang fails here.

    def close(self) -> None:
        assert self.waited, "messages may still be under way"
        self._check_graphs()
        self.closed = "closed"

    def abort(self) -> None:
        self._check_graphs()
        self.closed = "aborted"

    def _check_graphs(self) -> None:
        assert not any(graph() for graph in self._graphs), "a graph outlives the communicator that it uses"

    # Execution

    @property
    def group(self) -> Group:
        return self.queued[0]

    def run_to_a_group(self) -> bool:
        """Run what comes before the next group; whether that was anything."""
        moved = False
        while self.queued and not isinstance(self.queued[0], Group):
            self.queued.popleft()()
            moved = True
        return moved

    def _waiting(self) -> list[Post]:
        return self.queued[0].waiting if self.queued and isinstance(self.queued[0], Group) else []

    def first(self, kind: str, peer: int) -> Post | None:
        """The first message of the current group of that kind with that peer."""
        return next((post for post in self._waiting() if (post.kind, post.peer) == (kind, peer)), None)

    def met(self, post: Post) -> None:
        self.group.waiting = [waiting for waiting in self.group.waiting if waiting is not post]
        if not self.group.waiting:
            self.queued.popleft()


class QueuedOperator:
    """An operator whose merges are queued to a stream, as kernels are."""

    def __init__(self, operator: Any, stream: Stream) -> None:
        self.dtype, self.width = operator.dtype, operator.width
        self._operator, self._stream = operator, stream
        self.planned = 0

    def planned_merge(self, into: Any, other: Any) -> Callable[[], object]:
        return self.planned_merge_many(into, other[None])

    def planned_merge_many(self, into: Any, others: Any) -> Callable[[], object]:
        assert others.shape[1:] == into.shape
        assert others.flags.c_contiguous
        assert into.flags.c_contiguous
        self.planned += 1

        def fold() -> None:
            for other in others:
                self._operator.planned_merge(into, other)()

        return partial(self._stream.queue, fold)
