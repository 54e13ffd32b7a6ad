"""Generation: continues a prompt, with draft tokens or without, and takes the times."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from treeattn.collectives.runtime import watchdog
from treeattn.llama.drafts import Drafter, draft_tree
from treeattn.llama.session import Session
from treeattn.mpi.communicators import broadcast_from_root
from treeattn.partial import Array


@dataclass(slots=True)
class Continuation:
    """The tokens that were generated and what they took.

    first_token_s: of the prefill and the first token. step_s: of each step that followed. attention_s: of it,
    in attention and its communication, on this rank. accepted: drafts that each step kept. digests: of a
    reproducible model, the SHA-256 of the logits that each token was chosen by.
    """

    tokens: list[int]
    first_token_s: float
    step_s: list[float] = field(default_factory=list)
    attention_s: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


def generate(
    session: Session,
    count: int,
    stop: tuple[int, ...] = (),
    drafter: Drafter | None = None,
    on_step: Callable[[Continuation], object] = lambda continuation: None,
    progress: Callable[[str], object] = lambda line: None,
) -> Continuation:
    """Generate `count` tokens after the prompt of a new session, at most up to one of `stop`. Collective.

    drafter: of rank 0, which alone asks one, for the trees that the session was planned with.
    on_step: called after every step; progress: with a line, while the prompt runs. Drafts change the number
    of steps, and of a greedy text no token that is not as likely as another to within rounding. With a
    `reproducible` model they change no bit of any logit.
    """
    clock, layers = time.perf_counter, session.model.config.layers
    text = session.prompt_tokens.tolist()
    with watchdog.Activity("the beginning of a text"):
        session.comm.barrier()
    began = clock()

    def on_layer(layer: int) -> None:
        rate = len(text) * (layer + 1) / layers / (clock() - began)
        progress(f"prompt of {len(text):,} tokens: {layer + 1} of {layers} layers, {rate:,.0f} tokens/s")

    logits = session.prefill(on_layer)
    made = Continuation([session.choose(logits)], clock() - began)
    made.digests += _digests(session, logits[None])
    on_step(made)
    text += made.tokens
    while len(made.tokens) < count and made.tokens[-1] not in stop:
        began, before = clock(), session.attention_s
        new, logits = _step(session, text, count - len(made.tokens), drafter)
        made.step_s.append(clock() - began)
        made.attention_s.append(session.attention_s - before)
        made.accepted.append(len(new) - 1)
        end = next((n for n, token in enumerate(new, 1) if token in stop), len(new))
        made.tokens += new[:end]
        made.digests += _digests(session, logits[:end])
        text += new
        on_step(made)
    return made


def _digests(session: Session, logits: Array) -> list[str]:
    return [hashlib.sha256(row.tobytes()).hexdigest() for row in logits if session.model.reproducible]


def _step(session: Session, tokens: list[int], left: int, drafter: Drafter | None) -> tuple[list[int], Array]:
    """The next tokens, at least one and at most `left`, and the logits by which each was chosen."""
    paths: list[list[int]] = []
    nodes = 0 if session.tree_decoder is None else session.tree_decoder.shape.queries
    if nodes and left > 1:

        def propose() -> list[list[int]]:
            return drafter(tokens, nodes - 1, left - 1) if drafter is not None else []

        paths = broadcast_from_root(session.comm, propose, "the drafts of rank 0")
    if not paths:
        logits = session.step(tokens[-1])
        return [session.choose(logits)], logits[None]
    tree = draft_tree(tokens[-1], paths, nodes)
    logits = session.verify(tree)
    accepted = session.accept(tree, logits)
    session.commit(accepted.path)
    kept = accepted.path[0, : int(accepted.counts[0])]
    return [*tree.tokens[0, kept[1:]].tolist(), int(accepted.next_tokens[0])], logits[kept]
