"""Draft tokens: what followed the same words before (prompt lookup).

A drafter is given a text's tokens and proposes paths of tokens that may follow. It is right or wrong without
effect on the text, only on its speed (`treeattn.token_tree`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from treeattn.token_tree import TokenTree

#: A source of drafts for one text, of (tokens, budget, depth): paths of at most `depth` tokens, together at
#: most `budget`, that may follow `tokens`, which are those of the call before and more; none without an idea.
Drafter: TypeAlias = Callable[[list[int], int, int], list[list[int]]]


class NgramDrafts:
    """What followed the last tokens where they stood before: the two latest places whose next tokens differ,
    found by as many tokens (at most `longest`) as there are such places for."""

    def __init__(self, longest: int = 3) -> None:
        self._sizes = range(longest, 0, -1)
        self._ends: dict[tuple[int, ...], list[int]] = {}  # of words that something follows
        self._known = 0

    def __call__(self, tokens: list[int], budget: int, depth: int) -> list[list[int]]:
        for end in range(self._known + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._ends.setdefault(tuple(tokens[end - size : end]), []).append(end)
        self._known = max(self._known, len(tokens) - 1)
        for size in self._sizes:
            if ends := self._ends.get(tuple(tokens[-size:])):
                return self._paths(tokens, ends, budget, depth)
        return []

    def _paths(self, tokens: list[int], ends: list[int], budget: int, depth: int) -> list[list[int]]:
        other = next((end for end in reversed(ends) if tokens[end] != tokens[ends[-1]]), None)
        places = [ends[-1]] if other is None or budget < 2 else [ends[-1], other]
        longest = min(depth, budget // len(places))
        return [tokens[place : place + longest] for place in places if longest]


def draft_tree(last: int, paths: Sequence[Sequence[int]], nodes: int) -> TokenTree:
    """A tree of `nodes` slots whose root is the last token, which is in no cache yet; drafts follow it."""
    tree = TokenTree.from_paths([[last, *path] for path in paths])
    spare = ((0, 0), (0, nodes - tree.nodes))
    tokens, parents = np.pad(tree.tokens, spare), np.pad(tree.parents, spare, constant_values=-1)
    return TokenTree.from_parents(tokens, parents, tree.lengths)
