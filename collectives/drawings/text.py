"""Drawings and exports of a schedule: text here, `svg`, `html` for a step-through, `goal` for simulators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from treeattn.collectives import parameters
from treeattn.collectives.drawings.exports import goal
from treeattn.collectives.drawings.html import html
from treeattn.collectives.drawings.svg import chunk_range, headline, svg
from treeattn.collectives.parameters import Groups
from treeattn.collectives.schedule import Round, Schedule, Transfer

__all__ = ["goal", "html", "svg", "text"]

PICTURE_RANKS = 32
PICTURE_COLUMNS = 132
LISTED_TRANSFERS = 64  # per round; JSON has them all


def text(schedule: Schedule, nodes: Sequence[Any] | None = None) -> str:
    """The rounds as lists and, where it fits a terminal, as a picture with one lane per rank.

    `nodes`: node sizes or the ranks of each node. Raises `ScheduleError` for a schedule that does not
    check.
    """
    grouped = parameters.groups(schedule.name, nodes, schedule.size)
    lines = [*headline(schedule, grouped), "", *_round_list(schedule)]
    lanes = _Lanes(schedule, grouped)
    if schedule.rounds and schedule.size <= PICTURE_RANKS:
        picture = [*lanes.header(), *lanes.rows()]
        if max(map(len, picture)) <= PICTURE_COLUMNS:
            lines += ["", *picture, "", lanes.legend()]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _round_list(schedule: Schedule) -> Iterator[str]:
    whole = range(schedule.chunks)
    for number, round_ in enumerate(schedule.rounds, 1):
        shown = [
            t.arrow + ("" if t.chunks == whole else f"[{chunk_range(t.chunks)}]")
            for t in round_[:LISTED_TRANSFERS]
        ]
        if len(round_) > LISTED_TRANSFERS:
            shown.append(f"and {len(round_) - LISTED_TRANSFERS} more")
        yield f"round {number}: {', '.join(shown)}"


@dataclass(frozen=True)
class _Arrow:
    """A vertical line of the picture, between the lanes `top` and `bottom`."""

    top: int
    bottom: int
    ends: dict[float, str]  # lane -> what stands there
    line: str

    def at(self, lane: float, empty: str) -> str:
        """The character in a lane, or between two lanes (a half)."""
        return self.ends.get(lane, self.line if self.top < lane < self.bottom else empty)


class _Lanes:
    """The picture: one line per rank, one column per arrow; arrows side by side in a round share columns."""

    def __init__(self, schedule: Schedule, nodes: Groups) -> None:
        self.nodes = nodes
        self.order = [rank for node in nodes for rank in node]
        self.lane = {rank: at for at, rank in enumerate(self.order)}
        self.node = parameters.node_of(nodes)
        self.columns = [_packed(self._arrows(round_)) for round_ in schedule.rounds]
        self.label = max(len(f"node {len(nodes)}") if len(nodes) > 1 else 0, 5)

    def header(self) -> Iterator[str]:
        numbers = "".join(
            str(number).ljust(2 * len(columns) + 2) for number, columns in enumerate(self.columns, 1)
        )
        yield f"{'round':>{self.label}}     {numbers}"

    def rows(self) -> Iterator[str]:
        for index, node in enumerate(self.nodes):
            if index:
                yield " " * (self.label + 4) + self._cells(self.lane[node[0]] - 0.5, " ")
            for rank in node:
                name = f"node {index}" if rank == node[0] and len(self.nodes) > 1 else ""
                yield f"{name:>{self.label}} {rank:>2} " + self._cells(self.lane[rank], "─")

    def legend(self) -> str:
        between = "; ┃ ┇ between nodes" if len(self.nodes) > 1 else ""
        return f"● sends, ▲ ▼ receives; │ merge, ┊ copy{between}"

    def _cells(self, lane: float, empty: str) -> str:
        rounds = (
            empty.join(
                next((a.at(lane, empty) for a in column if a.top <= lane <= a.bottom), empty)
                for column in columns
            )
            for columns in self.columns
        )
        return empty + (empty * 3).join(rounds) + empty

    def _arrows(self, round_: Round) -> Iterator[_Arrow]:
        """One per transfer; two ranks that exchange share one."""
        pairs = {(t.src, t.dst) for t in round_}
        drawn: set[tuple[int, int]] = set()
        for t in round_:
            if (t.src, t.dst) in drawn:
                continue
            both = (t.dst, t.src) in pairs
            drawn |= {(t.src, t.dst)} | ({(t.dst, t.src)} if both else set())
            yield self._arrow(t, both)

    def _arrow(self, transfer: Transfer, both: bool) -> _Arrow:
        src, dst = self.lane[transfer.src], self.lane[transfer.dst]
        far = self.node[transfer.src] != self.node[transfer.dst]
        line = ("┃" if far else "│") if transfer.merge else ("┇" if far else "┊")
        head, back = ("▲", "▼") if dst < src else ("▼", "▲")
        return _Arrow(min(src, dst), max(src, dst), {src: back if both else "●", dst: head}, line)


def _packed(arrows: Iterator[_Arrow]) -> list[list[_Arrow]]:
    """Columns of arrows that do not touch each other."""
    columns: list[list[_Arrow]] = []
    for arrow in sorted(arrows, key=lambda arrow: (arrow.top, arrow.bottom)):
        free = next((column for column in columns if column[-1].bottom < arrow.top), None)
        if free is None:
            columns.append([arrow])
        else:
            free.append(arrow)
    return columns
