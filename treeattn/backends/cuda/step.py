"""A decoder's step on a GPU as one C call of the host, which launches through the driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn.backends.cpu import compile
from treeattn.backends.cpu.records import code_address
from treeattn.backends.cuda.attention import PlannedAttention
from treeattn.backends.cuda.runtime import Runtime
from treeattn.collectives.runtime.cuda_graph import CudaGraph
from treeattn.collectives.runtime.reducer import Reducer
from treeattn.partial import Array

# struct launch and struct launch_step of kernels/cpu/launch_step.c.
_LAUNCH = np.dtype(
    [
        *((name, "u8") for name in ("kernel", "graph", "arguments")),
        *((name, np.uint32, 3) for name in ("grid", "block")),
        ("shared_bytes", "i8"),
    ]
)
_STEP = np.dtype([(name, "u8") for name in ("launch_kernel", "launch_graph", "launches", "count")])


class PlannedStep:
    """`attention`, what `reducer` queues, and `finish`: the bits of the three parts."""

    def __init__(
        self,
        attention: PlannedAttention,
        reducer: Reducer,
        finish: Any,
        behind: tuple[Any, ...],
        lengths: Callable[[Any, int], Any],
        forget: Callable[[], object],
        runtime: Runtime,
    ) -> None:
        """reducer: one that is idle, or whose steps are `behind`, launches and graphs. lengths: makes of
        lengths and a number of tokens what `attention` takes. forget: drops the arrays that a closer look was
        taken at."""
        self._attention, self._reducer, self._finish, self._behind = attention, reducer, finish, behind
        self._lengths, self._forget, self._runtime = lengths, forget, runtime
        # On a rank alone who stores the last of a record finishes it.
        results = [runtime.address(array) for array in finish.arrays[1:]]
        self._results = np.array(results if reducer.idle else 0, np.uint64)
        self._step = self._launch if reducer.idle else reducer.step_by(self._launch)
        self._prepared: tuple[Any, ...] = ()
        kernels, driver = compile.loaded()[0], runtime.driver
        self._call: Any = None
        if kernels is not None and driver is not None:
            self._struct = np.zeros(1, _STEP)
            self._struct["launch_kernel"] = code_address(driver.cuLaunchKernel)
            self._struct["launch_graph"] = code_address(driver.cuGraphLaunch)
            self._call = functools.partial(kernels.launch_step, ctypes.c_void_p(self._struct.ctypes.data))

    def run(self, *given: Any) -> None:
        """A step over (q, k, v, lengths, block table)."""
        attention = self._attention
        if not attention.takes(*given):
            attention.bind(*given)
        self._forget()
        self._step()

    def __call__(self, q: Array, k: Array, v: Array, lengths: Any = None) -> bool:
        """One step. False: nothing was done, since arrays that are not laid out as the last ones were need a
        closer look, before `run`, and a decoder that is closed says so."""
        attention, bound = self._attention, self._attention.bound
        if not bound or not (type(q) is type(bound[0]) and type(k) is type(bound[1]) is type(v)):
            return False
        if len(k.shape) != 4 or self._reducer._closed:
            return False
        if lengths is not None and lengths is not bound[3]:
            lengths = self._lengths(lengths, k.shape[1])
        if not attention.takes(q, k, v, lengths):
            return False
        self._step()
        return True

    def _launch(self) -> None:
        """In one C call where the launches are known, but into a graph one by one, as from the first on that
        the driver refuses: the runtime says why."""
        attention, queued = self._attention, 0
        attention.results[:] = self._results
        if attention.launches is not self._prepared:
            self._prepare()
        if self._prepared and not self._runtime.capturing():
            queued = self._call(ctypes.c_void_p(self._runtime.stream))
            if queued == len(self._table):
                return
            self._runtime.check("q", attention.bound[0])
        for launch in (*attention.launches, *self._behind)[queued:]:
            launch()

    def _prepare(self) -> None:
        """Write down the launches of a step, once all are known: a graph is from the second step on."""
        self._runtime.check("q", self._attention.bound[0])  # a kernel is loaded to the GPU that is current
        graphs = [launch.recorded for launch in self._behind if isinstance(launch, CudaGraph)]
        if self._call is None or None in graphs:
            self._prepared = ()
            return
        launches = (*self._attention.launches, *self._behind)
        self._table = np.zeros(len(launches), _LAUNCH)
        for entry, launch in zip(self._table, launches, strict=True):
            if isinstance(launch, CudaGraph):
                entry["graph"] = self._runtime.handle(launch.recorded)
                continue
            grid, block, (arguments,) = launch.args
            entry["kernel"], entry["arguments"] = self._runtime.handle(launch.func), arguments.ctypes.data
            entry["grid"], entry["block"] = ((*axes, 1, 1)[:3] for axes in (grid, block))
            entry["shared_bytes"] = launch.keywords.get("shared_mem", 0)
        self._struct["launches"], self._struct["count"] = self._table.ctypes.data, len(launches)
        self._prepared = self._attention.launches
