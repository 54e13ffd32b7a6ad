"""What a results file holds: JSON lines of three kinds, `Run`, `Point` and `Failure`.

Every line has ``kind`` ("run", "point" or "error"), ``format`` and ``run``, the id of the job that wrote it.
Times are microseconds, sizes bytes. Numbers that JSON has no words for are strings, "nan" and "inf".

A file may have been cut, edited, joined or written by another version. A line that decodes as these types has
every field that is computed with, within bounds, so that readers meet no surprise; fields with a default may
be missing, and others may be there too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from treeattn.collectives.clusters.disturbance import duration
from treeattn.study.intervals import Estimate

#: Of the lines; a reader leaves lines of another format alone and names them.
FORMAT = 1

#: What stands among the schemes in results without being one: its results are not judged. The same bytes
#: through a library's own sum, over NCCL `NCCL_SUM`; and nothing, which is the harness's own cost.
SUM, NULL = "MPI_Allreduce(SUM)", "null"
NCCL_SUM = "ncclAllReduce(sum)"

#: Of an element of the records under way.
WIRE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}

_MOST = 10**18  # of any number: sums and ratios of such are finite

Whole = Annotated[int, Meta(ge=0, le=_MOST)]
Positive = Annotated[int, Meta(ge=1, le=_MOST)]
Number = Annotated[float, Meta(ge=-_MOST, le=_MOST)]
Length = Annotated[float, Meta(ge=0, le=_MOST)]
Series = Annotated[list[Number], Meta(min_length=1)]
Difference = Number | Literal["nan", "inf"] | None
#: Tier -> (messages, bytes); messages None where they are not known.
Tiers = dict[Literal["intra", "inter", "unknown"], tuple[Whole | None, Whole]]
#: How many ranks of a job a point uses, and how many of each node if not all.
Place = tuple[int, int | None]


def members(nodes: Sequence[int], place: Place) -> list[int]:
    """The ranks of a job that a point uses; nodes: of each of its ranks, the node."""
    ranks, per_node = place
    before: Counter[int] = Counter()
    found = []
    for rank, node in enumerate(nodes):
        if per_node is None or before[node] < per_node:
            found.append(rank)
        before[node] += 1
    return found[:ranks]


class Key(Struct, frozen=True):
    """Every parameter of a point; two points with one key may be combined.

    what: ``"reduce"``, the reduction alone, or ``"decode"``, the whole step. scheme: as ``scheme=`` takes it,
    or `SUM` or `NULL`. tokens: context length over all ranks, 0 where it has no part (reduce). wire: type of
    the records under way. arrivals: when ranks enter, in the words of `disturbance`. device: where ranks
    compute. transport: how records travel, as ``transport=`` takes it; "none" for `NULL` on a GPU.
    executor: who was asked to run the rounds of a schedule on the host; None: the best that there is.
    ranks_per_node: of each node the first so many ranks take part, at most `ranks` in all; None: of all ranks
    the first `ranks`.
    """

    what: Literal["reduce", "decode"]
    scheme: str
    ranks: Positive
    tokens: Whole
    batch: Positive
    queries: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    dtype: str
    wire: Literal["float32", "bfloat16", "float64"] = "float32"
    arrivals: str = "together"
    device: Literal["cpu", "cuda"] = "cpu"
    transport: str = "mpi"
    executor: Literal["slots", "program", "mpi"] | None = None
    ranks_per_node: Positive | None = None

    def check(self) -> None:
        """Raise `ValueError` for a transport that the device, or nothing, does not have."""
        on_cpu, none = self.device == "cpu", self.transport == "none"
        if on_cpu != (self.transport == "mpi") or none != (self.scheme == NULL and not on_cpu):
            raise ValueError(f"key: {self.scheme} on {self.device} over {self.transport}")
        duration(self.arrivals.partition(":")[2] or "0")
        if self.executor is not None and (not on_cpu or self.scheme in (SUM, NULL)):
            raise ValueError(f"key: {self.scheme} on {self.device}, run by {self.executor}")

    @property
    def place(self) -> Place:
        """Which ranks of a job take part."""
        return self.ranks, self.ranks_per_node

    @property
    def spread(self) -> float:
        """Microseconds that arrivals are scaled by; 0 for ranks that enter together, or as a list says."""
        _, _, spread = self.arrivals.partition(":")
        return duration(spread) if spread else 0.0

    @property
    def case(self) -> tuple[Any, ...]:
        """All but scheme, transport and executor; points of one case are compared with one another."""
        apart = ("scheme", "transport", "executor")
        return tuple(value for name, value in structs.asdict(self).items() if name not in apart)

    @property
    def label(self) -> str:
        """What tells it apart within its case; the scheme, from GPUs also the transport, and an executor that
        was asked for."""
        if self.executor is not None:
            return f"{self.scheme} [{self.executor}]"
        if self.device == "cpu" or self.scheme == NULL:
            return self.scheme
        if self.scheme == SUM and self.transport == "nccl":
            return NCCL_SUM
        return f"{self.scheme} [{self.transport}]"


class Line(Struct, kw_only=True, tag_field="kind"):
    """What every line has."""

    format: Literal[1]
    run: str


class Software(Struct, kw_only=True):
    """Versions of what can change a result or a time. isa: what kernels are compiled for."""

    packages: dict[str, str | None]
    git: str | None
    mpi: str
    python: str | None = None
    platform: str | None = None
    command: list[str] | None = None
    isa: str | None = None

    def __post_init__(self) -> None:
        if "treeattn" not in self.packages:
            raise ValueError("packages: treeattn is missing")


class Rank(Struct, kw_only=True):
    """Where a rank ran. machine_cores: what all ranks of its machine may use together. gpu: the name of the
    one that it computed on, or None."""

    node: Whole
    cpu: str
    rank: Whole | None = None
    host: str | None = None
    cores: Whole | None = None
    machine: Whole | None = None
    machine_cores: Whole | None = None
    gpu: str | None = None


class Clocks(Struct, kw_only=True):
    """How many clocks the ranks read, how they were compared, and the largest error."""

    source: str
    clocks: Positive
    error: Length
    method: str


class Run(Line, kw_only=True, tag="run"):
    """A job, before its first point. ranks: all of its ranks. gpu: what nvidia-smi says on rank 0's machine.
    environment: variables that change times. warning: ranks share cores, or None."""

    software: Software
    ranks: Annotated[list[Rank], Meta(min_length=1)]
    started: str = "unknown"
    gpu: list[str] | None = None
    environment: dict[str, str] = {}
    clock: Clocks | None = None
    options: dict[str, Any] = {}
    warning: str | None = None

    def used(self, place: Place) -> list[Rank]:
        """The ranks that a point used."""
        return [self.ranks[rank] for rank in members([rank.node for rank in self.ranks], place)]


class Point(Line, kw_only=True, tag="point", omit_defaults=True):
    """One block of iterations of one scheme.

    launch, repetition: which block of this key it is. plan, first: the cold values, slowest rank: planning,
    and the first call after it. late: iterations which some rank entered after the agreed instant. warmup:
    untimed calls before. took: the whole block from planning to checking, slowest rank. clock_error: half
    the fastest round trip of the clocks' comparison, worst rank; 0 where all ranks read one clock.

    executor: which of `treeattn.collectives.executors` ran the schedule; None where there is none, and in
    results that are older than the choice.

    determinism, rounds, depth: of the certificate; "measured" and None where there is none. sent: by tier,
    within a node (intra) and between nodes (inter), of all ranks in one step, as handed over by messages or
    in shared memory. scheduled: the same as the schedule says. None where the library decides. same_bits:
    whether all ranks held equal results; None where each holds other heads, or there is nothing to compare.
    digest: of the whole result: more than one for a key means other bits in another block. error_out,
    error_lse: largest difference from the float64 reference; bound_out, bound_lse: what "exact" allows.

    held, step_peak: bytes that planning and a first step leave allocated, and that a further step adds at
    its peak, worst rank, as tracemalloc sees them (NumPy's buffers, not the MPI library's); None for blocks
    after the first of a key in a run. estimate: what is
    predicted of the median that the case is compared by, with its interval and its ratio.

    of_ranks: of each rank, the median over the iterations of the time between its own entry and exit; None in
    older results.

    samples: name of a series -> one value for each iteration. ``completion``: last exit minus first entry on
    the synchronised clock; ``after_last_entry``: last exit minus last entry; ``slowest``: the longest time
    between a rank's own entry and exit. For ``what="decode"`` on processors also ``local``, ``reduce`` and
    ``finish``: the longest time of each part on any rank. For schedules with ``what="reduce"`` there also
    ``null_merge``: completion with merges that do nothing.
    """

    key: Key
    launch: Positive
    repetition: Whole
    plan: Number
    first: Number
    late: Whole
    warmup: Whole = 0
    clock_error: Length
    determinism: str
    rounds: Whole | None
    depth: Whole | None
    sent: Tiers | None
    scheduled: Tiers | None
    same_bits: bool | None
    digest: str | None
    error_out: Difference
    error_lse: Difference
    bound_out: Difference
    bound_lse: Difference
    held: Whole | None
    step_peak: Whole | None
    samples: dict[str, Series]
    of_ranks: Series | None = None
    took: Length = 0.0
    estimate: Estimate | None = None
    executor: str | None = None

    def check(self) -> None:
        """What types cannot say, for readers. Raises `ValueError`."""
        for tiers in (self.sent, self.scheduled):
            if tiers is not None and not {"intra", "inter"} <= tiers.keys():
                raise ValueError("sent, scheduled: intra or inter is missing")
        if not {"completion", "slowest", "after_last_entry"} <= self.samples.keys():
            raise ValueError("samples: completion, slowest or after_last_entry is missing")
        if min(self.samples["completion"]) <= 0:
            raise ValueError("samples: completion is not above 0")
        if self.of_ranks is not None and len(self.of_ranks) != self.key.ranks:
            raise ValueError("of_ranks: is not of as many ranks as the key has")
        self.key.check()
        judged = self.key.scheme not in (SUM, NULL)
        judgement = self.error_out, self.error_lse, self.bound_out, self.bound_lse
        if any((value is not None) != judged for value in judgement) or (judged and self.digest is None):
            raise ValueError("a scheme has a digest, errors and bounds, what is none has no errors or bounds")


class Failure(Line, kw_only=True, tag="error"):
    """A scheme that could not run there, and why."""

    key: Key
    launch: Positive
    message: str
