"""The proof that a schedule counts every rank exactly once wherever its result is promised, or the error that
says where not.

The check runs the schedule on expressions instead of numbers (`provenance`). A set of contributors
would not do: a rank that is merged twice leaves the set as it is and the softmax wrong. MSCCLang's
checker (Cowan et al., ASPLOS 2023) compares multisets; expressions also show the order of the merges,
which decides whether all ranks end with the same bits. Proofs are kept, since a schedule is a value.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, NoReturn

from treeattn.collectives.provenance import NOTHING, ChunkMap, Expressions, Piece, aligned
from treeattn.collectives.schedule import RESULTS, TRANSFER_LIMIT, Round, Schedule, Transfer
from treeattn.errors import ScheduleError

Determinism = Literal["A", "C", "none"]

_REMEMBERED = 1 << 15  # messages of a schedule whose proof is kept: some megabytes


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is known of a schedule that reduces exactly once.

    determinism: ``"A"``: all ranks end with identical bits whenever the pairwise merge is commutative
    to the bit; ``"C"``: they do when merges of three or more values are also folded in ascending order
    of the lowest contributing rank; ``"none"``: every rank is counted once, but bits may differ.
    min_records_for_double_buffering: from so many records on every rank's result depends on every rank, so no
    rank can run two steps ahead of another; None where no number is enough.
    """

    determinism: Determinism
    rounds: int
    depth: int  # longest chain of merges
    messages: int
    fan_in: int  # most messages that reach one rank in one round
    volume: float  # sent by all ranks together, in multiples of one rank's records
    min_records_for_double_buffering: int | None
    bits: str = "of the schedule"  # whose function the bits are; the operator may have them "of the tokens"


class FoldOrder(NamedTuple):
    """One merge of `chunks` at a receiver: what the ranks in `sources` held, folded in this order.

    The receiver is one of the sources and stands for its own value.
    """

    chunks: range
    sources: tuple[int, ...]


# Per round: receiver -> its folds, ascending by chunk.
FoldOrders = tuple[dict[int, tuple[FoldOrder, ...]], ...]


class Proof(NamedTuple):
    """The certificate, and the order in which each receiver folds."""

    certificate: Certificate
    folds: FoldOrders


def check(schedule: Schedule) -> Certificate:
    """Prove that `schedule` is an exactly-once reduction.

    Raises `ScheduleError`, naming scheme, size, round, transfer and rank, for a rank counted twice or
    not at all, conflicting writes of one round, and transfers of ranks or chunks that do not exist.

    >>> certificate = collectives.check(collectives.build("binary_tree", 5))
    >>> certificate.determinism, certificate.rounds, certificate.messages
    ('A', 4, 8)
    """
    return prove(schedule).certificate


def prove(schedule: Schedule) -> Proof:
    """`check`, and the order in which each receiver folds, which executors need. Raises as `check` does.

    >>> proof = collectives.prove(collectives.build("chain", 3))
    >>> proof.certificate.depth
    2
    """
    return (_remembered if schedule.messages <= _REMEMBERED else _prove)(schedule)


def _prove(schedule: Schedule) -> Proof:
    return _Prover(schedule).run()


_remembered = functools.lru_cache(maxsize=64)(_prove)


class _Prover:
    """What every rank holds, round by round."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.size = schedule, schedule.size
        self._check_shape()
        self.expressions = Expressions(schedule.size)
        self.everyone = (1 << schedule.size) - 1
        # Complete values go by one name, which stands for the first that was formed of each chunk: complete
        # chunks then lie in one run, however each was merged, where ranks would hold p runs each in the end.
        self.complete = self.expressions.name(self.everyone)
        self.first_complete = ChunkMap(schedule.chunks, NOTHING)
        self.held = [ChunkMap(schedule.chunks, rank) for rank in range(schedule.size)]

    def run(self) -> Proof:
        rounds = self.schedule.rounds
        folds = tuple(self._apply(number, round_) for number, round_ in enumerate(rounds, 1))
        return Proof(self._certificate(), folds)

    # One round

    def _apply(self, number: int, round_: Round) -> dict[int, tuple[FoldOrder, ...]]:
        incoming: dict[int, list[Transfer]] = {}
        for transfer in round_:
            self._check_transfer(number, transfer)
            incoming.setdefault(transfer.dst, []).append(transfer)
        # Every transfer reads the state before the round: nothing is written until all is read.
        written: list[tuple[int, list[list[Piece]]]] = []
        folds: dict[int, tuple[FoldOrder, ...]] = {}
        for rank, transfers in incoming.items():
            done: list[FoldOrder] = []
            parts = [self._receive_part(number, rank, *part, done) for part in _parts(transfers)]
            written.append((rank, parts))
            if done:
                folds[rank] = tuple(_joined(done, {t.chunks.start for t in transfers}))
        for rank, parts in written:
            for pieces in parts:
                self.held[rank].write(pieces)
        return folds

    def _receive_part(
        self, number: int, rank: int, first: int, end: int, transfers: list[Transfer], done: list[FoldOrder]
    ) -> list[Piece]:
        """The new pieces of chunks first .. end - 1 at `rank`, all of them touched by all `transfers`."""
        if not all(t.merge for t in transfers):
            if len(transfers) > 1:
                self._conflict(number, rank, first, transfers)
            return self.held[transfers[0].src].read(first, end)
        sources = [rank, *(t.src for t in transfers)]
        columns = [self.held[source].read(first, end) for source in sources]
        lowest = self.expressions.lowest
        pieces = []
        for start, stop, values in aligned(columns):
            self._check_once(number, start, transfers, values)
            order = sorted(range(len(values)), key=lambda i: lowest[values[i]])
            done.append(FoldOrder(range(start, stop), tuple(sources[i] for i in order)))
            pieces += self._named(
                start, stop, self.expressions.fold([values[i] for i in order], rank, number)
            )
        return pieces

    def _named(self, first: int, end: int, value: int) -> list[Piece]:
        """`value` for the chunks first .. end - 1, or where it stands for it, the name of complete values."""
        if self.expressions.mask[value] != self.everyone:
            return [(first, end, value)]
        known = [(a, b, value if v == NOTHING else v) for a, b, v in self.first_complete.read(first, end)]
        self.first_complete.write(known)
        return [(a, b, self.complete if v == value else value) for a, b, v in known]

    def _merged(self, pieces: list[Piece]) -> Iterator[Piece]:
        """The pieces with what the name of complete values stands for."""
        for first, end, value in pieces:
            if value == self.complete:
                yield from self.first_complete.read(first, end)
            else:
                yield first, end, value

    def _check_once(
        self, number: int, chunk: int, transfers: list[Transfer], values: tuple[int, ...]
    ) -> None:
        masks = self.expressions.mask
        counted = masks[values[0]]
        for transfer, value in zip(transfers, values[1:], strict=True):
            twice = counted & masks[value]
            if twice:
                ranks = _some(self.expressions.ranks(twice))
                self._fail(number, transfer, f"counts {ranks} twice in chunk {chunk} of rank {transfer.dst}")
            counted |= masks[value]

    # The end state

    def _certificate(self) -> Certificate:
        schedule, final = self.schedule, self._final()
        self._check_complete(final)
        left = self._merged(list({piece for pieces in final for piece in pieces}))
        reach = [Counter(t.dst for t in round_) for round_ in schedule.rounds]
        sent = sum(len(t.chunks) for round_ in schedule.rounds for t in round_)
        return Certificate(
            determinism=self._determinism(final),
            rounds=len(schedule.rounds),
            depth=max(self.expressions.depth[value] for _, _, value in left),
            messages=schedule.messages,
            fan_in=max((count for counts in reach for count in counts.values()), default=0),
            volume=sent / schedule.chunks,
            min_records_for_double_buffering=self._min_records(),
        )

    def _min_records(self) -> int | None:
        """Chunks that are promised to a rank depend on all ranks, but for those without records: with fewer
        records than ranks some rank's only chunk is one. A rank that is promised nothing waits for none."""
        if self.schedule.result == "scattered":
            return self.schedule.size
        return 1 if self.schedule.result == "replicated" or self.size == 1 else None

    def _final(self) -> list[list[Piece]]:
        """Per rank, the pieces that the schedule promises."""
        promised = (self.schedule.promised(rank) for rank in range(self.size))
        return [
            held.read(chunks.start, chunks.stop) if chunks else []
            for held, chunks in zip(self.held, promised, strict=True)
        ]

    def _check_complete(self, final: list[list[Piece]]) -> None:
        for rank, pieces in enumerate(final):
            for first, end, value in pieces:
                missing = self.everyone & ~self.expressions.mask[value]
                if missing:
                    lacks = _some(self.expressions.ranks(missing))
                    where = f"chunk {first}" if end == first + 1 else f"chunks {first} to {end - 1}"
                    self._refuse(f"after the last round rank {rank} lacks {lacks} in {where}")

    def _determinism(self, final: list[list[Piece]]) -> Determinism:
        if self.schedule.result != "replicated":
            return "A"  # each result exists on one rank only: no other can differ
        if all(pieces == final[0] for pieces in final):
            return "A"
        names = self.expressions.ordered
        ordered = [list(_relabelled(self._merged(pieces), names)) for pieces in final]
        return "C" if all(pieces == ordered[0] for pieces in ordered) else "none"

    # Shape and messages

    def _check_shape(self) -> None:
        size, chunks, result = self.schedule.size, self.schedule.chunks, self.schedule.result
        if size < 1 or chunks < 1:
            self._refuse(f"needs at least one rank and one chunk, not {size} and {chunks}")
        if chunks > TRANSFER_LIMIT:  # executors keep a place for each
            self._refuse(f"has {chunks} chunks, the limit is {TRANSFER_LIMIT}")
        if result not in RESULTS:
            self._refuse(f"result {result!r} is none of {', '.join(map(repr, RESULTS))}")
        if result == "scattered" and chunks != size:
            self._refuse(f"a scattered result needs as many chunks as ranks, not {chunks}")

    def _check_transfer(self, number: int, transfer: Transfer) -> None:
        src, dst, chunks, _ = transfer
        size = self.schedule.size
        if not (0 <= src < size and 0 <= dst < size):
            self._fail(number, transfer, f"names a rank outside 0 to {size - 1}")
        if src == dst:
            self._fail(number, transfer, f"sends from rank {src} to itself")
        if not chunks or chunks.step != 1:
            self._fail(number, transfer, "moves no chunk, or not a contiguous range of them")
        if chunks.start < 0 or chunks.stop > self.schedule.chunks:
            self._fail(number, transfer, f"names a chunk outside 0 to {self.schedule.chunks - 1}")

    def _conflict(self, number: int, dst: int, chunk: int, transfers: list[Transfer]) -> NoReturn:
        copies = [t for t in transfers if not t.merge]
        merges = [t for t in transfers if t.merge]
        other, what = (copies[1], "another copy") if len(copies) > 1 else (merges[0], "a merge")
        self._fail(
            number, copies[0], f"overwrites chunk {chunk} of rank {dst} beside {what} into it ({other.arrow})"
        )

    def _fail(self, number: int, transfer: Transfer, problem: str) -> NoReturn:
        chunks = f" of chunks {transfer.chunks.start}:{transfer.chunks.stop}" if transfer.chunks else ""
        self._refuse(f"round {number}: transfer {transfer.arrow}{chunks} {problem}")

    def _refuse(self, problem: str) -> NoReturn:
        raise ScheduleError(f"{self.schedule.name} on {self.schedule.size} ranks: {problem}")


def _parts(transfers: list[Transfer]) -> Iterator[tuple[int, int, list[Transfer]]]:
    """Cut what reaches one rank into chunk ranges that are each touched by a fixed set of transfers."""
    if all(t.chunks == transfers[0].chunks for t in transfers):
        yield transfers[0].chunks.start, transfers[0].chunks.stop, transfers
        return
    bounds = sorted({bound for t in transfers for bound in (t.chunks.start, t.chunks.stop)})
    for first, end in pairwise(bounds):
        touching = [t for t in transfers if t.chunks.start <= first and end <= t.chunks.stop]
        if touching:
            yield first, end, touching


def _joined(folds: list[FoldOrder], starts: set[int]) -> Iterator[FoldOrder]:
    """Neighbouring folds of the same sources in the same order are one fold, unless a message starts there:
    executors look for a fold's chunks in one message of each source."""
    last = folds[0]
    for fold in folds[1:]:
        meets = fold.chunks.start == last.chunks.stop and fold.chunks.start not in starts
        if meets and fold.sources == last.sources:
            last = FoldOrder(range(last.chunks.start, fold.chunks.stop), last.sources)
        else:
            yield last
            last = fold
    yield last


def _relabelled(pieces: Iterable[Piece], names: list[int]) -> Iterator[tuple[int, int]]:
    """Starts and new expressions of the runs that are left when expressions are renamed."""
    last = -1
    for first, _, value in pieces:
        if names[value] != last:
            last = names[value]
            yield first, last


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
