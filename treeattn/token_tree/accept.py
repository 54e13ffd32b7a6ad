"""Acceptance of draft tokens: one rank decides for all, since ranks that decide alone drift apart.

A rule walks down a row's tree from its one root, which is no draft but the token that was sampled last, whose
keys and values are not in the cache yet.

Tiny differences between ranks (another CPU, another order of sums) would flip a choice that is nearly a tie;
then counts differ, and the next collective hangs. So rank 0 decides and broadcasts; what other ranks pass is
not looked at. Sampling follows the target model exactly, whatever the drafts are; the rule published with
beam drafts (arXiv 2403.09919) does not, since each beam tries its luck on a prefix that they share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeattn.collectives.runtime.communicator import Given
from treeattn.errors import ArgumentError
from treeattn.mpi import communicators
from treeattn.mpi.communicators import broadcast_from_root
from treeattn.token_tree.tree import Integers, TokenTree, integers

Probabilities = NDArray[np.float64]

#: Of a row and a node: the child to go to, if any, and the token after the node.
NextNode = Callable[[int, int], tuple[list[int], int]]


class Accepted(NamedTuple):
    """What was decided, the same on every rank.

    path: int64 [batch, longest], the slots that are kept from the root on, then -1; what a cache commits.
    counts: int64 [batch], how many, the root among them. next_tokens: int64 [batch], the
    token that the model puts after the path: the root of the next tree.
    """

    path: Integers
    counts: Integers
    next_tokens: Integers


def accept_greedy(tree: TokenTree, target_tokens: ArrayLike, *, comm: Given = None) -> Accepted:
    """Keep the drafts that are what the model would have said itself. Collective.

    Parameters
    ----------
    tree : TokenTree
        The drafts, behind one root in each row.
    target_tokens : integers [batch, L]
        The model's token after each node. Rank 0's count.

    Raises
    ------
    ArgumentError
        On every rank: arrays of other shapes or types, several roots.

    Examples
    --------
    >>> tree = treeattn.token_tree.TokenTree.from_paths([[7, 1, 2], [7, 3]])
    >>> accepted = treeattn.token_tree.accept_greedy(tree, [[3, 9, 9, 5]])  # says 3 after 7, and 5 after 3
    >>> accepted.path.tolist(), accepted.next_tokens.tolist()
    ([[0, 3]], [5])
    """

    def walk() -> Accepted:
        tokens = integers("target_tokens", target_tokens, tree.tokens.shape)

        def step(row: int, node: int) -> tuple[list[int], int]:
            said, children = tokens[row, node], tree.children(row, node)
            return children[tree.tokens[row, children] == said][:1].tolist(), int(said)

        return _walk(tree, step)

    return broadcast_from_root(communicators.intracomm(comm), walk, "what rank 0 accepts")


def accept_speculative(
    tree: TokenTree,
    probabilities: ArrayLike,
    draft_probabilities: ArrayLike,
    generator: np.random.Generator,
    *,
    comm: Given = None,
) -> Accepted:
    """Keep drafts that were sampled, with the help of the distributions they were sampled from. Collective.

    Siblings are tried in the order of their slots: one is kept with probability min(1, p / q); else p loses
    what q had covered, q loses the token, and the next one is tried. What comes out follows the model's
    distribution if siblings were drawn from q one after the other without replacement, in that order (drawn
    with replacement and packed, they were). Drafts that are no samples, such as beams, are for
    `accept_greedy` with tokens that were sampled after each node.

    Parameters
    ----------
    tree, comm
        As for `accept_greedy`.
    probabilities : [batch, L, vocabulary]
        p, the model's after each node; rows add up to 1. Rank 0's count, as does its `generator`.
    draft_probabilities : [batch, L, vocabulary]
        q, from which the children of each node were drawn; not looked at where a node has none.

    Raises
    ------
    ArgumentError
        As `accept_greedy`; what are no probabilities; a token that its q cannot have drawn.

    Notes
    -----
    Source: Leviathan et al., arXiv 2211.17192; without replacement, Sequoia, arXiv 2402.12374.

    Examples
    --------
    >>> tree = treeattn.token_tree.TokenTree.from_paths([[0, 1]])
    >>> p = q = np.full((1, 2, 4), 0.25)  # of model and drafter: drafts are kept
    >>> accepted = treeattn.token_tree.accept_speculative(tree, p, q, np.random.default_rng(0))
    >>> accepted.path.tolist()
    [[0, 1]]
    """

    def walk() -> Accepted:
        target = _probabilities("probabilities", probabilities, tree.real)
        draft = _probabilities("draft_probabilities", draft_probabilities, tree.inner)
        if target.shape != draft.shape:
            raise ArgumentError(
                f"probabilities are over {target.shape[-1]} tokens, draft_probabilities over "
                f"{draft.shape[-1]}: one vocabulary is needed, in which what the drafter does not know has "
                "draft probability 0"
            )

        def step(row: int, node: int) -> tuple[list[int], int]:
            p, q = target[row, node], draft[row, node]
            for child in tree.children(row, node).tolist():
                token = int(tree.tokens[row, child])
                if not 0 <= token < len(q) or not q[token] > 0:
                    raise ArgumentError(
                        f"row {row}: node {child} holds token {token}, which its draft distribution cannot "
                        "have drawn: accept_greedy takes drafts of any origin"
                    )
                if generator.random() * q[token] < p[token]:
                    return [child], token
                p, q = _residual(p, q, token)
            return [], draw_token(p, generator)

        return _walk(tree, step)

    return broadcast_from_root(communicators.intracomm(comm), walk, "what rank 0 accepts")


def _residual(p: Probabilities, q: Probabilities, token: int) -> tuple[Probabilities, Probabilities]:
    """p and q for the next sibling: p without what q covered, q without the token."""
    rest, others = np.maximum(p - q, 0), q.copy()
    others[token] = 0
    left, remaining = rest.sum(), others.sum()
    # p = q to the last bit leaves nothing, and then nothing is ever refused but by rounding.
    return rest / left if left > 0 else p, others / remaining if remaining > 0 else others


def draw_token(p: Probabilities, generator: np.random.Generator) -> int:
    """A token from probabilities [vocabulary] that add up to 1, by one number of the generator; never one of
    probability 0. Raises `ArgumentError` for NaN."""
    reached = np.cumsum(p)
    total = reached[-1]
    if not total > 0:
        raise ArgumentError(f"no token can be drawn: probabilities add up to {total}")
    return int(np.searchsorted(reached, min(generator.random() * total, np.nextafter(total, 0)), "right"))


def _walk(tree: TokenTree, step: NextNode) -> Accepted:
    """Go down every row's tree as `step` says: the slots that are kept, and the token after them."""
    paths, tokens = [], []
    for row in range(tree.batch):
        path = tree.children(row).tolist()
        if len(path) != 1:
            raise ArgumentError(
                f"row {row} has {len(path)} roots: it is one, the token that was sampled last, which drafts "
                "follow"
            )
        while True:
            child, token = step(row, path[-1])
            if not child:
                break
            path += child
        paths.append(path)
        tokens.append(token)
    kept = np.full((len(paths), max(map(len, paths))), -1)
    for row, path in enumerate(paths):
        kept[row, : len(path)] = path
    return Accepted(kept, (kept >= 0).sum(1), np.array(tokens, np.int64))


def _probabilities(name: str, given: ArrayLike, wanted: NDArray[np.bool_]) -> Probabilities:
    """float64 [*wanted.shape, vocabulary], whose `wanted` rows add up to 1."""
    array = np.asarray(given)
    if array.ndim != wanted.ndim + 1 or array.shape[:-1] != wanted.shape or array.shape[-1] < 1:
        axes = ", ".join(map(str, (*wanted.shape, "vocabulary")))
        raise ArgumentError(f"{name} have shape {list(array.shape)}: [{axes}] is needed")
    array = np.where(wanted[..., None], array, 0).astype(np.float64)
    total = array.sum(-1)
    if (array < 0).any() or not (np.abs(total - 1) < 1e-3)[wanted].all():
        raise ArgumentError(f"{name} are no probabilities: each row is of numbers from 0 on that add up to 1")
    return np.asarray(array / np.where(wanted, total, 1)[..., None])
