"""Continue a prompt, with draft tokens or without, and take the times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from treeattn import comm as comm_
from treeattn.collectives import waiting
from treeattn.llama.drafts import Drafter, draft_tree
from treeattn.llama.session import Session

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Drafting", "Made", "generate"]


@dataclass(frozen=True, slots=True)
class Drafting:
    """Drafts of trees of so many nodes, the root among them; drafter: rank 0's, which alone is asked."""

    nodes: int
    drafter: Drafter | None


@dataclass(slots=True)
class Made:
    """The tokens of a continuation and what it took.

    first_token_s: of the prefill and the first token. step_s: of each step that followed. attention_s: of it,
    in attention and its communication, on this rank. accepted: drafts that each step kept.
    """

    tokens: list[int]
    first_token_s: float
    step_s: list[float] = field(default_factory=list)
    attention_s: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def generate(
    comm: Intracomm,
    session: Session,
    prompt: list[int],
    count: int,
    stop: tuple[int, ...] = (),
    drafting: Drafting | None = None,
    told: Callable[[Made], object] = lambda made: None,
    say: Callable[[str], object] = lambda line: None,
) -> Made:
    """`count` tokens after the prompt of a new session, at most up to one of `stop`. Collective.

    told: called after every step; say: with a line of progress, while the prompt runs. Drafts change the
    number of steps, and no token that is not as likely as another to within rounding: those that are kept are
    what would have been chosen without them.
    """
    clock = comm_.mpi().Wtime
    with waiting.watched("the beginning of a text"):
        comm.Barrier()
    began = clock()
    layers = session.model.config.layers

    def ran(layer: int) -> None:
        rate = len(prompt) * (layer + 1) / layers / (clock() - began)
        say(f"prompt of {len(prompt):,} tokens: {layer + 1} of {layers} layers, {rate:,.0f} tokens/s")

    made = Made([session.choose(session.prefill(ran))], 0.0)
    made.first_token_s = clock() - began
    told(made)
    text = prompt + made.tokens
    while len(made.tokens) < count and made.tokens[-1] not in stop:
        began, before = clock(), session.attention_s
        new = _step(comm, session, text, count - len(made.tokens), drafting)
        made.step_s.append(clock() - began)
        made.attention_s.append(session.attention_s - before)
        made.accepted.append(len(new) - 1)
        ends = [n for n, token in enumerate(new, 1) if token in stop]
        made.tokens += new[: ends[0]] if ends else new
        text += new
        told(made)
    return made


def _step(
    comm: Intracomm, session: Session, tokens: list[int], left: int, drafting: Drafting | None
) -> list[int]:
    """The next tokens, at least one and at most `left`."""
    paths: list[list[int]] = []
    if drafting is not None and left > 1:
        drafter, budget = drafting.drafter, drafting.nodes - 1

        def proposed() -> list[list[int]]:
            return drafter(tokens, budget, left - 1) if drafter is not None else []

        paths = comm_.decided(comm, proposed, "the drafts of rank 0")
    if drafting is None or not paths:
        return [session.choose(session.step(tokens[-1]))]
    tree = draft_tree(tokens[-1], paths, drafting.nodes)
    accepted = session.accept(tree, session.verify(tree))
    session.commit(accepted.path)
    kept = accepted.path[0, 1 : int(accepted.counts[0])]
    return [*tree.tokens[0, kept].tolist(), int(accepted.next_tokens[0])]
