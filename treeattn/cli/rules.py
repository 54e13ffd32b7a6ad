"""Rules of attention as options of a command, and the oracle's partial under them."""

from __future__ import annotations

from typing import Any

import click
import numpy as np

from treeattn import reference
from treeattn.attention.mask import Rules
from treeattn.cli.options import grouped, read
from treeattn.errors import ArgumentError


def _window(text: str) -> tuple[int | None, int | None]:
    """Read ``LEFT,RIGHT``; a side that is empty is unbounded. Raises `ArgumentError`."""
    sides = text.split(",")
    if len(sides) != 2 or not all(side.isdecimal() or not side for side in sides):
        raise ArgumentError(f"{text}: two whole numbers LEFT,RIGHT; an empty one is unbounded")
    left, right = (int(side) if side else None for side in sides)
    return left, right


#: Options that a command takes as one argument, a `treeattn.Rules`.
rule_options = grouped(
    "rules", Rules,
    click.option("--causal", is_flag=True, help="Queries see no key that comes after them."),
    click.option("--window", callback=read(_window), metavar="LEFT,RIGHT",
                 help="Queries see keys from LEFT before to RIGHT behind them."),
    click.option("--leading", type=click.IntRange(0), default=0,
                 help="Tokens at the beginning that a window leaves visible."),
    click.option("--softcap", type=float, help="Logits x become softcap * tanh(x / softcap)."),
)  # fmt: skip


def oracle(
    rules: Rules, q: Any, k: Any, v: Any, *, scale: float, lengths: Any, positions: Any, q_positions: Any
) -> reference.Partial:
    """The oracle's partial of one shard, whose tokens stand at `positions` [tokens], for queries at
    `q_positions` [batch, queries]."""
    plain = {"scale": scale, "lengths": lengths, "softcap": rules.softcap}
    if not rules.positional:
        return reference.partial(q, k, v, **plain)
    stands = np.broadcast_to(q_positions, q.shape[:2])
    return reference.partial(
        *(q, k, v),
        **plain,
        seen=reference.seen(
            positions, stands, causal=rules.causal, window=rules.window, leading=rules.leading
        ),
        alibi=None if rules.alibi is None else np.asarray(rules.alibi),
        distance=stands[:, :, None] - np.asarray(positions)[None, None],
    )
