"""What queries may see, as the command line and the input file say it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click
import numpy as np

from treeattn import reference
from treeattn.errors import ArgumentError

__all__ = ["Rules", "window"]

F = TypeVar("F", bound=Callable[..., Any])


def window(text: str | None) -> tuple[int | None, int | None] | None:
    """Read ``LEFT,RIGHT``; a side that is empty is unbounded. Raises `ArgumentError`."""
    if text is None:
        return None
    sides = text.split(",")
    if len(sides) != 2 or not all(side.isdecimal() or not side for side in sides):
        raise ArgumentError(f"--window {text}: two whole numbers LEFT,RIGHT; an empty one is unbounded")
    left, right = (int(side) if side else None for side in sides)
    return left, right


@dataclass(frozen=True, slots=True)
class Rules:
    """Of one command. The arrays come from the input file where it holds them."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    leading: int = 0
    softcap: float | None = None
    alibi: Any = None
    sink_logits: Any = None

    @staticmethod
    def options(command: F) -> F:
        """The options that name them."""
        for option in (
            click.option("--softcap", type=float, help="Logits x become softcap * tanh(x / softcap)."),
            click.option(
                "--leading",
                type=click.IntRange(0),
                default=0,
                help="Tokens at the beginning that a window leaves visible.",
            ),
            click.option(
                "--window",
                metavar="LEFT,RIGHT",
                help="Queries see keys from LEFT before to RIGHT behind them.",
            ),
            click.option("--causal", is_flag=True, help="Queries see no key that comes after them."),
        ):
            command = option(command)
        return command

    def planned(self) -> dict[str, Any]:
        """Those in force, as `treeattn.Decoder` takes them."""
        given = {name: getattr(self, name) for name in Rules.__slots__}
        nothing = {"causal": False, "leading": 0}
        return {
            name: value
            for name, value in given.items()
            if value is not None and value is not nothing.get(name)
        }

    @property
    def ask_positions(self) -> bool:
        """Whether it matters where tokens stand."""
        return self.causal or self.window is not None or self.alibi is not None

    def partial(
        self, q: Any, k: Any, v: Any, *, scale: float, lengths: Any, positions: Any, q_positions: Any
    ) -> reference.Partial:
        """The oracle's partial of one shard, whose tokens stand at `positions` [tokens], for queries at
        `q_positions` [batch, queries]."""
        plain = {"scale": scale, "lengths": lengths, "softcap": self.softcap}
        if not self.ask_positions:
            return reference.partial(q, k, v, **plain)
        stands = np.broadcast_to(q_positions, q.shape[:2])
        return reference.partial(
            *(q, k, v),
            **plain,
            seen=reference.seen(
                positions, stands, causal=self.causal, window=self.window, leading=self.leading
            ),
            alibi=self.alibi,
            distance=stands[:, :, None] - np.asarray(positions)[None, None],
        )
