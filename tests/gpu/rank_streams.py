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


class Streams:
    """One schedule over records [records, head_dim + 2] of each rank: buffers, planned steps and streams.

    They share the multiprocessors: each has as many blocks as leave room for all at once."""

    def __init__(
        self, schedule: Schedule, records: int, head_dim: int = HEAD_DIM, *, seconds: float = 10.0
    ) -> None:
        import cupy

        self.schedule, self._runtime = schedule, cupy_runtime.current()
        proof, ranks = prove(schedule), range(schedule.size)
        operator = cuda.MergeOperator(head_dim, runtime=self._runtime)
        programs = [program.plan(schedule, proof, rank, records, node=tuple(ranks)) for rank in ranks]
        self._windows = [self._runtime.expose(operator.window_bytes(each))[0] for each in programs]
        self.buffers = [cupy.zeros((records, head_dim + 2), np.float32) for _ in ranks]
        share = self._runtime.multiprocessors // schedule.size
        blocks = max(1, min(operator.resident_blocks(records), share))
        self.steps: list[Any] = [
            operator.planned_gets(self.buffers[rank], programs[rank], self._windows, seconds, blocks)
            for rank in ranks
        ]
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in ranks]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Free the windows, once nothing runs."""
        self._runtime.synchronize_all()
        for address in self._windows:
            self._runtime.withdraw(address)


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
