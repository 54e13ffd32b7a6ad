"""The ranks of a node as streams of one GPU, all in flight at once: the L2 cache stands for the links."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from treeattn import collectives
from treeattn.backends import cuda
from treeattn.backends.cuda import cupy_runtime
from treeattn.collectives import program
from treeattn.collectives.check import prove
from treeattn.collectives.schedule import Schedule

HEAD_DIM = 128


class Ranks:
    """One schedule over records [records, head_dim + 2] of each rank, all on one device: buffers and planned
    steps. They share the multiprocessors: each has as many blocks as leave room for all at once."""

    def __init__(
        self, runtime: Any, schedule: Schedule, records: int, head_dim: int, *, seconds: float = 10.0
    ) -> None:
        self._runtime, self.schedule = runtime, schedule
        proof, ranks = prove(schedule), range(schedule.size)
        operator = cuda.MergeOperator(head_dim, runtime=runtime)
        self.programs = [program.plan(schedule, proof, rank, records, node=tuple(ranks)) for rank in ranks]
        self._windows = [runtime.expose(operator.window_bytes(each))[0] for each in self.programs]
        width = head_dim + 2
        self.buffers = [runtime.zeros(records * width, np.float32).reshape(records, width) for _ in ranks]
        blocks = max(1, min(operator.resident_blocks(records), runtime.multiprocessors // schedule.size))
        self.steps: list[Any] = [
            operator.planned_gets(self.buffers[rank], self.programs[rank], self._windows, seconds, blocks)
            for rank in ranks
        ]

    def close(self) -> None:
        """Free the windows, once nothing runs."""
        self._runtime.synchronize_all()
        for address in self._windows:
            self._runtime.withdraw(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Streams(Ranks):
    """The ranks of a schedule, each with a stream of its own."""

    def __init__(self, schedule: Schedule, records: int, head_dim: int, **options: float) -> None:
        import cupy

        super().__init__(cupy_runtime.current(), schedule, records, head_dim, **options)
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(schedule.size)]


def microseconds(
    scheme: str, size: int = 8, records: int = 16, count: int = 500, laps: int = 5
) -> list[float]:
    """Of a step, in each lap of `count` steps that all ranks have in flight at once."""
    import cupy

    with Streams(collectives.build(scheme, size), records, HEAD_DIM) as ranks:
        graphs = []
        for step, stream in zip(ranks.steps, ranks.streams, strict=True):
            with stream:
                step()  # compiled and loaded outside the capture
        cupy.cuda.Device().synchronize()
        for step, stream in zip(ranks.steps, ranks.streams, strict=True):
            with stream:
                stream.begin_capture()
                for _ in range(count):
                    step()
                graphs.append(stream.end_capture())
        found = []
        for _ in range(laps + 1):
            began, ended = cupy.cuda.Event(), [cupy.cuda.Event() for _ in graphs]
            began.record(ranks.streams[0])
            for stream in ranks.streams[1:]:
                stream.wait_event(began)
            for graph, stream, event in zip(graphs, ranks.streams, ended, strict=True):
                graph.launch(stream)
                event.record(stream)
            cupy.cuda.Device().synchronize()
            found.append(max(cupy.cuda.get_elapsed_time(began, event) for event in ended) * 1e3 / count)
        late = [step.timed_out_peer() for step in ranks.steps]
        if any(late):
            raise SystemExit(f"{scheme}: a rank waited in vain: {late}")
        return found[1:]
