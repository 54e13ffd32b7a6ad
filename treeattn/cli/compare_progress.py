"""What a person sees while `treeattn compare` measures: a bar and times so far, if stderr is a terminal."""

from __future__ import annotations

import statistics
import sys
from typing import Any

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from treeattn.errors import TreeattnError
from treeattn.study.compare.schema import Key
from treeattn.study.compare.sweep import Block

__all__ = ["Live"]


class Live:
    """Says how much there is to do, then shows how far it is; on other ranks than 0 nothing."""

    def __init__(self, plan: list[Key], blocks: int, skipped: int, enabled: bool) -> None:
        self._live: RichLive | None = None
        if not enabled:
            return
        console = Console(stderr=True, highlight=False, markup=False)
        cases = len({key.case for key in plan})
        console.print(
            f"{len(plan)} points ({len(plan) // max(cases, 1)} schemes in {cases} cases), {blocks} blocks"
            + (f"; {skipped} are in the file already and are not measured again" if skipped else "")
        )
        if not sys.stderr.isatty():
            return
        self._medians: dict[Key, list[float]] = {}
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=console,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=blocks, completed=skipped)
        self._live = RichLive(self._bar, console=console, transient=True, refresh_per_second=4)
        self._live.start()

    def began(self, block: Block) -> None:
        """A block is about to be measured."""
        if self._live is not None:
            self._bar.update(self._task, description=f"{block.key.what} {block.key.scheme}")

    def ended(self, block: Block, fields: dict[str, Any]) -> None:
        """A block was measured."""
        if self._live is not None:
            median = statistics.median(fields["samples"]["completion"])
            self._medians.setdefault(block.key, []).append(median)
            self._bar.advance(self._task)
            self._live.update(Group(self._table(block.key.case), self._bar))

    def failed(self, key: Key, error: TreeattnError | str) -> None:
        """A scheme cannot run there."""
        if self._live is not None:
            self._live.console.print(f"{key.scheme}: {error}", markup=False)

    def _table(self, case: Any) -> Table:
        table = Table("scheme", "blocks", "median, µs")
        now = {key: values for key, values in self._medians.items() if key.case == case}
        for key, values in sorted(now.items(), key=lambda item: statistics.median(item[1])):
            table.add_row(key.scheme, str(len(values)), f"{statistics.median(values):,.1f}")
        return table

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None
