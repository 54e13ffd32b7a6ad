"""Acceptance: greedy against the published vectors, sampling against the model's distribution.

Seeds are fixed, so a test that passes goes on to pass. The critical values are those that chi-square of a
right rule exceeds in one of 10,000 runs.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from tests.support.refusals import refused
from treeattn.token_tree import TokenTree, accept_greedy, accept_speculative
from treeattn.token_tree.accept import draw_token

VECTORS = np.load(Path(__file__).resolve().parents[2] / "data/token_tree_vectors.npz", allow_pickle=False)
GREEDY = [e["case"] for e in json.loads(VECTORS["manifest_json"].tobytes()) if e["greedy"]]

CRITICAL = {3: 21.11, 15: 44.26}  # degrees of freedom -> chi-square of probability 1e-4

# A model over four tokens that looks at the last one, and a drafter that is wrong about it.
MODEL = np.array([[0.3, 0.3, 0.25, 0.15], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.5, 0.0]])
DRAFT = np.array([[0.6, 0.2, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.5, 0.0, 0.25, 0.25]])
START = 0


def chi_square(tokens, expected):
    """Of tokens (numbers from 0) that should have these probabilities."""
    counts = np.bincount(tokens, minlength=expected.size)
    wanted = expected.ravel() * len(tokens)
    assert not counts[wanted == 0].any()
    return float(((counts - wanted) ** 2 / np.where(wanted, wanted, 1)).sum())


def following(tokens, table, generator):
    """A token drawn after each of these."""
    return (table[tokens].cumsum(-1)[..., :-1] < generator.random((*np.shape(tokens), 1))).sum(-1)


def two_emitted(tree, accepted, generator):
    """The first two tokens after the root, as one number; where one is missing the model goes on alone."""
    emitted = []
    for row, path in enumerate(accepted.path):
        said = [*tree.tokens[row, path[path >= 0]][1:], accepted.next_tokens[row]]
        if len(said) < 2:
            said.append(following(said[-1], MODEL, generator))
        emitted.append(said[0] * 4 + said[1])
    return np.array(emitted)


PAIRS = MODEL[START][:, None] * MODEL  # of the first two tokens
ROWS = 4_000


def beams_of(kind, generator):
    """Beams [ROWS, M, 3] that begin with START; `kind` says how the rest was found."""
    made = {
        "one": [[0, 1]],
        "the most probable": [[0, 0], [1, 3]],
        "a shared first token": [[0, 0], [0, 1], [0, 2], [0, 3]],
        "everything": [[a, b] for a in range(4) for b in range(4)],
        "nonsense": [[3, 3], [3, 2]],
    }
    if kind == "sampled":
        first = following(np.full((ROWS, 3), START), DRAFT, generator)
        drafts = np.stack([first, following(first, DRAFT, generator)], 2)
    else:
        drafts = np.broadcast_to(np.array(made[kind]), (ROWS, len(made[kind]), 2))
    return np.concatenate([np.full((*drafts.shape[:2], 1), START), drafts], 2)


def test_greedy_is_the_published_rule():
    for case in GREEDY:
        beams, said, counts, tokens, rows = (
            VECTORS[f"c{case:02d}.{name}"]
            for name in ("beams", "llm_next_packed", "greedy_n_accepted", "greedy_next_token", "greedy_row")
        )
        tree = TokenTree.from_beams(beams)
        accepted = accept_greedy(tree, np.where(tree.real, said, -99))
        np.testing.assert_array_equal(accepted.counts - 1, counts)
        np.testing.assert_array_equal(accepted.next_tokens, tokens)
        for row, count in enumerate(accepted.counts):
            path = tree.check_path(row, accepted.path[row, :count])
            np.testing.assert_array_equal(tree.tokens[row, path], beams[row, rows[row], :count])


@examples(20)
@given(st.integers(0, 2**32 - 1))
def test_greedy_is_decoding_token_by_token(seed):
    draw = np.random.default_rng(seed)
    beams = draw.integers(0, 3, (3, 6, 5))
    beams[..., 0] = START
    tree = TokenTree.from_beams(beams)
    says = draw.integers(0, 3, (3, 3**5))  # of a context: the model's next token

    def key(tokens):
        return sum((token + 1) * 4**place for place, token in enumerate(tokens)) % says.shape[1]

    targets = np.array([[says[row, key(tree.tokens[row, tree.path(row, slot)])] for slot in range(tree.nodes)]
                        for row in range(3)])  # fmt: skip
    accepted = accept_greedy(tree, targets)
    words = [
        {tuple(tree.tokens[row, tree.path(row, s)]) for s in range(tree.lengths[row])} for row in range(3)
    ]
    for row in range(3):
        said = [START]
        while tuple(said) in words[row]:
            said.append(int(says[row, key(said)]))
        count = accepted.counts[row]
        path = accepted.path[row, :count]
        assert [*tree.tokens[row, path], accepted.next_tokens[row]] == said
        assert (accepted.path[row, count:] == -1).all()


@pytest.mark.parametrize(
    "kind", ["one", "the most probable", "a shared first token", "everything", "nonsense", "sampled"]
)
def test_sampling_follows_the_model_for_any_drafts(kind):
    """Greedy acceptance of tokens that were drawn after each node."""
    generator = np.random.default_rng(7)
    tree = TokenTree.from_beams(beams_of(kind, generator))
    p = MODEL[tree.tokens]
    with np.errstate(divide="ignore"):
        accepted = accept_greedy(tree, (np.log(p) + generator.gumbel(size=p.shape)).argmax(-1))
    assert chi_square(two_emitted(tree, accepted, generator), PAIRS) < CRITICAL[15]


@pytest.mark.parametrize("siblings", [1, 2, 3, 8])
def test_speculation_follows_the_model(siblings):
    """Drafts drawn with replacement and packed: siblings are then drawn without."""
    generator = np.random.default_rng(11 + siblings)
    root = np.full((ROWS, siblings), START)
    first = following(root, DRAFT, generator)
    beams = np.stack([root, first, following(first, DRAFT, generator)], 2)
    tree = TokenTree.from_beams(beams)
    accepted = accept_speculative(tree, MODEL[tree.tokens], DRAFT[tree.tokens], generator)
    assert chi_square(two_emitted(tree, accepted, generator), PAIRS) < CRITICAL[15]
    if siblings == 1:
        kept = np.minimum(MODEL[START], DRAFT[START]).sum()  # what Leviathan et al. keep
        assert abs((accepted.counts > 1).mean() - kept) < 4 * np.sqrt(kept * (1 - kept) / ROWS)


def test_the_largest_number_of_a_generator_draws_a_token_too():
    """In float32 its product with the sum of probabilities is that sum."""
    generator = SimpleNamespace(random=lambda: 1 - 2**-53)
    assert draw_token(np.array([0.5, 0.5, 0], np.float32), generator) == 1


def test_the_smallest_number_of_a_generator_accepts_no_impossible_draft():
    p, q = (np.array([[row] * 2], float) for row in ([0.5, 0, 0.5, 0], [0.5, 0.5, 0, 0]))
    accepted = accept_speculative(CHAIN, p, q, SimpleNamespace(random=lambda: 0.0))
    assert accepted.counts.tolist() == [1]
    assert accepted.next_tokens.tolist() == [2]


FOREST = TokenTree.from_parents([[1, 2]], [[-1, -1]])
CHAIN = TokenTree.chain([[0, 1]])
ONES = np.full((1, 2, 4), 0.25)


def test_the_first_of_equal_siblings_is_kept():
    tree = TokenTree.from_parents([[1, 7, 7]], [[-1, 0, 0]])
    accepted = accept_greedy(tree, [[7, 3, 4]])
    assert (accepted.path.tolist(), accepted.next_tokens.tolist()) == ([[0, 1]], [3])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: accept_greedy(CHAIN, [[1, 2, 3]]), "target_tokens are int64 [1, 3]: integers [1, 2]"),
        (lambda: accept_greedy(CHAIN, [[1.0, 2.0]]), "target_tokens are float64"),
        (lambda: accept_greedy(FOREST, [[1, 2]]), "row 0 has 2 roots"),
        (lambda: accept_speculative(CHAIN, ONES[0], ONES, None), "[1, 2, vocabulary] is needed"),
        (lambda: accept_speculative(CHAIN, ONES * 2, ONES, None), "probabilities are no probabilities"),
        (lambda: accept_speculative(CHAIN, ONES * np.nan, ONES, None), "are no probabilities"),
        (lambda: accept_speculative(FOREST, ONES, ONES, None), "row 0 has 2 roots"),
        (lambda: accept_speculative(CHAIN, ONES, ONES * 3, None), "draft_probabilities are no prob"),
        (lambda: accept_speculative(CHAIN, ONES, np.eye(4)[[[0, 0]]], None), "cannot have drawn"),
        (lambda: accept_speculative(CHAIN, ONES, np.full((1, 2, 8), 0.125), None), "over 8: one vocabulary"),
    ],
)
def test_what_cannot_be_judged(call, words):
    with refused(words):
        call()
