"""Finds out why partial results of several ranks do not add up, from dumps of them.

`dump` reads them, `ranks` says what they show by themselves and what their q, k and v say, and `whole` finds
the merge that reproduces the result that was made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from treeattn.attention import arrays
from treeattn.attention.arrays import AnyArray
from treeattn.errors import ArgumentError
from treeattn.study.partials import ranks
from treeattn.study.partials.whole import Finding, base_name, explained, read_part

__all__ = ["Finding", "check_partials"]


def check_partials(
    parts: Sequence[Mapping[str, AnyArray]],
    whole: Mapping[str, AnyArray] | None = None,
    *,
    base: str | int = "e",
    scale: float | None = None,
) -> list[Finding]:
    """What is wrong with the partial results of ranks 0, 1, ..; an empty list if nothing is.

    parts: of each rank ``out`` [.., head_dim] and ``lse`` [..] (or with its last two axes exchanged, as
    flash-attention and `treeattn.decode` have it); perhaps ``merged_out`` and ``merged_lse``, what this rank
    held after the merge; perhaps ``q``, ``k`` and ``v`` as in `treeattn.decode`, with `scale`, default
    1 / sqrt(head_dim). whole: ``out`` and perhaps ``lse`` of all ranks, as suspected or as known; default
    what the first rank that tells held after the merge. base: of lse, as it is believed to be, ``"e"`` or 2.
    Arrays of any library that lie on the host.

    Raises `ArgumentError` for what is not such a dump.
    """
    base = base_name(base)
    if not parts:
        raise ArgumentError("no part was given: pass the dump of every rank")
    given = [{name: arrays.on_host(name, array) for name, array in part.items()} for part in parts]
    read = [read_part(f"rank {rank}", part, base) for rank, part in enumerate(given)]
    different = list(ranks.unlike(read))
    if different:
        return different  # nothing below would mean anything
    found = [*ranks.unwell(read, base), *ranks.alike(read), *ranks.merged_unlike(given)]
    found += [*ranks.recomputed(given, read, base, scale), *ranks.keys_held_twice(given)]
    if whole is None:
        told = next((part for part in given if "merged_out" in part), None)
        whole = told and {name: told[f"merged_{name}"] for name in ("out", "lse") if f"merged_{name}" in told}
    if whole is not None:
        held = {name: arrays.on_host(name, array) for name, array in whole.items()}
        found += explained(read, held, base)
    return found
