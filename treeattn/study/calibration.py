"""The prices of the machine that this job runs on: probes measured as `compare` measures schemes, and fitted.

Probes are reductions over some ranks, by the executor whose prices are wanted; all ranks meet before each, so
what is measured is what a step of a scheme would meet: ranks that share cores where they do. Times are from
the last entry: the simulator has all ranks enter at once.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from treeattn.backends.cpu import MergeOperator
from treeattn.collectives import build
from treeattn.collectives.clusters.description import Cluster, Executor, Tier
from treeattn.collectives.clusters.placement import Placement
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.decoder import Decoder, reducers
from treeattn.errors import ArgumentError
from treeattn.mpi import communicators, library, topology
from treeattn.mpi.communicators import MpiCommunicator
from treeattn.study import environment, extra
from treeattn.study.compare.loop import Clock, Loop
from treeattn.study.fit import Fitted, Probe, fit, probes

HEAD_DIM = 128
_BLOCKS, _WARMUP, _FEWEST, _MOST = 4, 3, 4, 100
_HEADS, _TOKENS = 8, 8192  # 32 MiB of keys and values, more than a core's caches
_ONE = 0x3F80  # in bfloat16


class Calibration(NamedTuple):
    """What was found, on rank 0. cluster: as a file holds it, with the rate at which a rank reads its cache;
    places: of the ranks of this job. fitted: with the errors of its prices, and what is left over.

    drift: what the last block, in the order of the first one, took of the time of the first; load: of rank
    0's machine, before and after; hosts: of the ranks.
    """

    cluster: Cluster
    places: Placement
    fitted: Fitted
    drift: float
    load: tuple[float, float]
    hosts: tuple[str, ...]
    seconds: float


def calibrate(
    comm: MpiCommunicator, name: str, executor: str | None, seconds: float, say: Callable[[str], object]
) -> Calibration | None:
    """Measure for about so many seconds, and fit. Collective; None on ranks other than 0.

    executor: as in `treeattn.decoder.reducers`; None: the best that there is. Raises `ArgumentError` for one
    rank, and what planning raises.
    """
    if comm.size < 2:
        raise ArgumentError("calibrate needs two ranks or more: mpiexec -n 4 treeattn calibrate ..")
    extra("scipy.optimize")  # before minutes of measuring
    began, load = time.perf_counter(), os.getloadavg()[0]
    found = topology.detect(comm)
    hosts = tuple(dict.fromkeys(entry["host"] for entry in environment.placement(comm)))
    wanted = list(probes(found.nodes, found.sockets))
    bench = _Bench(comm, executor, seconds / len(wanted) / _BLOCKS)
    samples: defaultdict[Probe, list[Any]] = defaultdict(list)
    for block in range(_BLOCKS):
        order = random.Random(block % (_BLOCKS - 1))  # what came first comes first again at last
        for at, probe in enumerate(order.sample(wanted, len(wanted))):
            say(f"{block * len(wanted) + at} of {_BLOCKS * len(wanted)} blocks are done")
            samples[probe].append(bench.measure(probe))
    shape, places = _shape(found, name, bench.executor)
    reading = bench.reading()
    if comm.rank:
        return None
    medians = {probe: float(np.median([np.median(block) for block in samples[probe]])) for probe in wanted}
    drift = float(np.median([np.median(of[-1]) / np.median(of[0]) for of in samples.values()]))
    fitted = fit(shape, places, bench.record_bytes, medians)
    cluster = _kept(fitted.cluster)
    cluster = structs.replace(cluster, memory=reading, drift=round(abs(math.log(drift)), 3))
    seconds, loads = time.perf_counter() - began, (load, os.getloadavg()[0])
    return Calibration(cluster, places, fitted, drift, loads, hosts, seconds)


def _shape(found: topology.Topology, name: str, executor: str) -> tuple[Cluster, Placement]:
    """As many nodes as there are; prices are still to come."""
    levels, places = found.levels()
    tiers = tuple(Tier(level, joins, 0.0, 0.0, 0.0, 1.0) for level, joins in levels)
    about = f"{len(found.nodes)} x {max(map(len, found.nodes))} ranks, calibrated with {executor}"
    free = {executor: Executor(0.0, 0.0, 1.0)}
    return Cluster(name, about, "node", tiers, free, executor, cards=found.nics), places


def _kept(cluster: Cluster) -> Cluster:
    """Without the assumed prices of what was not measured: of one rank a node, the node's are never used."""
    node, *outer = cluster.tiers
    if node.joins > 1 or not outer:
        return cluster
    alone = structs.replace(outer[0], name=node.name, joins=1)
    return structs.replace(cluster, tiers=(alone, *outer))


class _Bench:
    """Measures blocks of probes on one communicator. Creating it is collective."""

    def __init__(self, comm: MpiCommunicator, executor: str | None, seconds: float) -> None:
        self._comm, self._seconds = comm, seconds
        self._oversubscribed = environment.node_load(environment.placement(comm)) is not None
        self._loop = Loop(comm, Clock(comm), self._oversubscribed)
        self._operator = MergeOperator(HEAD_DIM)
        self.record_bytes = 4 * self._operator.width
        self.executor = self._chosen(executor)

    def _chosen(self, wanted: str | None) -> str:
        """Who runs a schedule over all ranks. Collective."""
        schedule = build("k_nomial_tree", self._comm.size)
        with reducers.run_rounds(wanted, schedule, self._reduction(self._comm, self._fresh(1)[0])) as reducer:
            return str(reducer.executor)

    def _fresh(self, records: int) -> tuple[Any, Any]:
        """A buffer, and what it holds before each step: a reduction in place would overflow in time."""
        values = np.random.default_rng(self._comm.rank).random((records, self._operator.width), np.float32)
        return values.copy(), values

    def _reduction(self, comm: MpiCommunicator, buffer: Any) -> ReductionSpec:
        return ReductionSpec(comm, self._operator, buffer)

    def _reducer(self, comm: MpiCommunicator, scheme: str, buffer: Any) -> Reducer:
        """As over all ranks. Not by `reducers.run_rounds`, which sees a few ranks alone, and cores enough."""
        from treeattn.collectives.executors import compiled, interpreter

        reduction, schedule = self._reduction(comm, buffer), build(scheme, comm.size)
        nodes = comm.nodes
        if self.executor == "mpi":
            return interpreter.InterpretedReducer(reduction, schedule)
        if self.executor == "program" or len(nodes) == comm.size:
            nodes = ()
        return compiled.plan(reduction, schedule, nodes=nodes, oversubscribed=self._oversubscribed)

    def measure(self, probe: Probe) -> list[float]:
        """Microseconds of each iteration of a block, on rank 0. Collective."""
        mine = next((at for at, group in enumerate(probe.groups) if self._comm.rank in group), None)
        undefined = library.load().UNDEFINED
        members: Any = self._comm.Split(undefined if mine is None else mine, self._comm.rank)
        if mine is None:
            return self._timed(tuple, tuple)
        buffer, values = self._fresh(probe.records)
        with self._reducer(members, probe.scheme, buffer) as reducer:
            found = self._timed(reducer, lambda: np.copyto(buffer, values))
        members.Free()
        return found

    def reading(self) -> float:
        """GB/s at which the attention of each rank reads its cache while all do. Collective."""
        q = np.full((1, 1, _HEADS, HEAD_DIM), _ONE, np.uint16)
        k, v = np.full((2, 1, _TOKENS, _HEADS, HEAD_DIM), _ONE, np.uint16)
        alone = communicators.alone()
        with Decoder(alone, heads=_HEADS, kv_heads=_HEADS, head_dim=HEAD_DIM, dtype="bfloat16") as decoder:
            times = self._timed(lambda: decoder(q, k, v), tuple)
        return float((k.nbytes + v.nbytes) / 1e3 / np.median(times)) if times else 0.0

    def _timed(self, step: Callable[[], object], prepare: Callable[[], object]) -> list[float]:
        began = time.perf_counter()
        self._loop.run((step,), prepare, _WARMUP)
        each = self._loop.agree_on_slowest(time.perf_counter() - began) / _WARMUP
        count = int(max(_FEWEST, min(_MOST, self._seconds / each - _WARMUP)))
        times = self._loop.run((step,), prepare, count)
        return [] if times is None else times.samples()["after_last_entry"]
