"""The rows of results: one for each block of iterations, as a line of JSON with the same columns in each.

``pandas.read_json("results.jsonl", lines=True)`` gives the table. Times are microseconds, sizes bytes,
bandwidths 10^9 bytes a second as OSU's benchmarks and nccl-tests print them. A line is on disk before the
next block is measured: a run that is killed loses the block in flight."""

from __future__ import annotations

import os
import secrets
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from treeattn.errors import ArgumentError, BackendError

#: What stands among the schemes without being one: as many bytes by the library's own sum. Over NCCL it is
#: called `NCCL_SUM`. With `/NAME` behind it, by the library's algorithm of that name, in a job of its own.
SUM, NCCL_SUM = "MPI_Allreduce(SUM)", "ncclAllReduce(sum)"

_SETTINGS = ("MPIR_CVAR_", "OMPI_MCA_coll", "I_MPI_ADJUST", "NCCL_ALGO", "NCCL_PROTO")
#: Iterations that a block should have: with fewer its median moves with every one of them.
ENOUGH = 20


class Key(msgspec.Struct, frozen=True):
    """Every parameter of a block; blocks of one key may be combined.

    what: ``"reduce"``, the reduction alone, or ``"decode"``, the whole step. scheme: as ``scheme=`` takes it,
    or `SUM`. tokens: context length over all ranks, 0 where it has no part (reduce). device: where ranks
    compute. transport: how records travel, as ``transport=`` takes it.
    """

    what: str
    scheme: str
    ranks: int
    tokens: int
    batch: int
    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    device: str = "cpu"
    transport: str = "mpi"

    @property
    def key(self) -> Key:
        """The key alone, of a row."""
        return Key(*(getattr(self, name) for name in Key.__struct_fields__))

    @property
    def case(self) -> tuple[Any, ...]:
        """All but scheme and transport: blocks of one case are compared with one another."""
        apart = ("scheme", "transport")
        return tuple(getattr(self, name) for name in Key.__struct_fields__ if name not in apart)

    @property
    def algorithm(self) -> str | None:
        """Of a library's sum, the library's algorithm that it is by; "" for the library's choice."""
        name, _, algorithm = self.scheme.partition("/")
        return algorithm if name == SUM else None

    @property
    def label(self) -> str:
        """What tells it apart within its case: the scheme, and from GPUs the transport."""
        if self.device == "cpu":
            return self.scheme
        if self.algorithm is not None and self.transport == "nccl":
            return self.scheme.replace(SUM, NCCL_SUM)
        return f"{self.scheme} [{self.transport}]"

    @property
    def record_bytes(self) -> int:
        """Bytes of a rank's records, which a reduction is of."""
        size = 8 if self.dtype == "float64" else 4
        return self.batch * self.queries * self.heads * (self.head_dim + 2) * size

    @property
    def words(self) -> str:
        """All of it that its case has."""
        text = f"{self.what}, {self.ranks} ranks, "
        text += f"{self.tokens:,} tokens, " if self.what == "decode" else f"{self.record_bytes:,} bytes, "
        text += f"batch {self.batch}, {self.queries} queries, " if self.batch * self.queries > 1 else ""
        text += f"{self.heads} heads ({self.kv_heads} KV) x {self.head_dim}, {self.dtype}"
        return text + (", on GPUs" if self.device == "cuda" else "")


class Row(Key, frozen=True, kw_only=True):
    """One block of iterations of one scheme, or why it could not run (`error`).

    run: the job's name, which no other has. commit: of treeattn. nodes: of each rank, in order, the number of
    its node. environment: variables that change times. warning: why times mean less than they seem to, such
    as ranks that share cores.

    repetition: which block of the key it is. bytes: of a rank's records.
    time_us: median over its iterations of the last exit minus the last entry, on one clock. algbw: bytes over
    that time; busbw: algbw times 2 (ranks - 1) / ranks, as nccl-tests has it for a reduction to all; None for
    whole steps. completion_us: last exit minus first entry. slowest_us, least_us, mean_us: of the ranks, each
    between its own entry and exit, as OSU's benchmarks take it. local_us, reduce_us, finish_us: the parts of
    a whole step, each on the rank where it took longest. plan_us, first_us: planning, and the first call
    after it. took_us: the whole block. iterations; late: of these, how many some rank entered after the
    agreed instant. clock_error_us: how far apart the clocks of ranks may be.

    executor: which of `treeattn.collectives.executors` ran the schedule. determinism, depth: of its
    certificate. rounds, rounds_inter, busiest_bytes, sends: as `treeattn.study.why.counts` counts them.
    messages, bytes: by tier, of all ranks in one step; bytes_library: handed to the library's
    own collective between nodes, which tells nothing else. as_scheduled: whether they are what the schedule
    says. same_bits: whether all ranks held one result; None where each holds other heads. digest: of the
    whole result. error_out, error_lse: largest difference from float64; bound_out, bound_lse: what "exact"
    allows.

    predicted_us, predicted_low_us, predicted_high_us: what the simulator says of time_us. schedule: of one's
    own, as JSON.
    """

    run: str
    started: str = ""
    treeattn: str | None = None
    commit: str | None = None
    mpi: str = ""
    processor: str = ""
    nodes: list[int] = []
    hosts: str = ""
    environment: dict[str, str] = {}
    command: str = ""
    warning: str | None = None
    repetition: int = 0
    bytes: int = 0
    time_us: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    completion_us: float | None = None
    slowest_us: float | None = None
    least_us: float | None = None
    mean_us: float | None = None
    local_us: float | None = None
    reduce_us: float | None = None
    finish_us: float | None = None
    plan_us: float | None = None
    first_us: float | None = None
    took_us: float = 0.0
    iterations: int = 0
    late: int = 0
    clock_error_us: float = 0.0
    executor: str | None = None
    determinism: str | None = None
    depth: int | None = None
    rounds: int | None = None
    rounds_inter: int | None = None
    busiest_bytes: int | None = None
    sends: str | None = None
    messages_intra: int | None = None
    messages_inter: int | None = None
    bytes_intra: int | None = None
    bytes_inter: int | None = None
    bytes_library: int | None = None
    as_scheduled: bool | None = None
    same_bits: bool | None = None
    digest: str | None = None
    error_out: float | None = None
    error_lse: float | None = None
    bound_out: float | None = None
    bound_lse: float | None = None
    predicted_us: float | None = None
    predicted_low_us: float | None = None
    predicted_high_us: float | None = None
    schedule: str | None = None
    error: str | None = None

    @property
    def wrong(self) -> str | None:
        """What is wrong with the result."""
        if self.same_bits is False:
            return "ranks ended with different bits"
        if self.as_scheduled is False:
            return "sent other messages than the schedule says"
        for error, bound in ((self.error_out, self.bound_out), (self.error_lse, self.bound_lse)):
            if bound is not None and not (error is not None and error <= bound):  # JSON has null for NaN
                return "the error is above the bound"
        return None


def settings(of: Row) -> str:
    """What the environment tells the library of its collectives, as `NAME=VALUE ..`. Nothing of a job by
    `--library-algorithm`, which has the library's choice too."""
    names = () if "--library-algorithm" in of.command else sorted(of.environment)
    return " ".join(f"{name}={of.environment[name]}" for name in names if name.startswith(_SETTINGS))


def version(of: Row) -> tuple[Any, ...]:
    """What must be equal for rows to be combined: software, processors, how ranks lie on nodes, what emulated
    these, and `settings`."""
    emulated = of.environment.get("TREEATTN_EMULATED")
    return of.treeattn, of.commit, of.mpi, of.processor, tuple(of.nodes), emulated, settings(of)


def run_name() -> str:
    """A name for this job that no other has."""
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def read(*paths: str | Path) -> list[Row]:
    """Every row of these files, each block once. A last line that was cut off is left out.

    Raises `ArgumentError` for a file that cannot be read, and for a line that is no row.
    """
    found: dict[tuple[Any, ...], Row] = {}
    for path in paths:
        try:
            lines = Path(path).read_bytes().split(b"\n")[:-1]
        except OSError as error:
            raise ArgumentError(f"{path}: cannot be read ({error.strerror})") from None
        for number, line in enumerate(lines, 1):
            try:
                row = _ROW.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ArgumentError(
                    f"{path}:{number}: not a row of treeattn compare ({error}); take the line out, or name "
                    "another file"
                ) from None
            found.setdefault((row.run, row.key, row.repetition), row)
    return list(found.values())


_ROW = msgspec.json.Decoder(Row, strict=False)


class Writer:
    """Appends rows to a file, each on disk before `append` returns.

    held: the rows that it held before. Raises `ArgumentError` for a file that cannot be written or that holds
    something else, which is left as it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.held = read(path) if path.exists() else []
        try:
            self._file = path.open("ab", buffering=0)
            self._file.truncate(path.read_bytes().rfind(b"\n") + 1)  # of a line that was cut off
        except OSError as error:
            raise ArgumentError(f"{path}: cannot be written ({error.strerror}); name another place") from None

    def append(self, row: Row) -> None:
        """Write a row. Raises `BackendError`."""
        try:
            line = memoryview(msgspec.json.encode(row) + b"\n")
            while line:  # a disk that is nearly full takes a part, and then says so
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise BackendError(
                f"{self._path}: cannot be written ({error.strerror}); what it holds is kept: make room, and "
                "the same command goes on from there"
            ) from None

    def close(self) -> None:
        self._file.close()
