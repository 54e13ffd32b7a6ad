"""One process: which tokens may be drawn, and how often each is."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from treeattn.errors import ArgumentError
from treeattn.llama import Sampling
from treeattn.llama.drafts import draft_tree

GOLDEN = Path(__file__).parents[2] / "golden" / "llama" / "sampling.npz"
#: Probabilities 0.4, 0.3, 0.15, 0.1, 0.05, in another order.
P = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
LOGITS = (np.log(P) + 7).astype(np.float32)


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, P),
        ({"temperature": 2.0}, np.sqrt(P)),
        ({"top_k": 2}, P * [0, 1, 0, 1, 0]),
        ({"top_k": 9}, P),
        ({"top_p": 0.75}, P * [0, 1, 0, 1, 1]),  # 0.7 is too little, 0.85 is enough
        ({"top_p": 0.01}, P * [0, 1, 0, 0, 0]),
        ({"top_k": 4, "top_p": 0.9}, P * [1, 1, 0, 1, 1]),  # 0.85 of 0.95 is too little
        ({"top_k": 3, "top_p": 0.8}, P * [0, 1, 0, 1, 0]),  # 0.7 of 0.85 is enough
        ({"temperature": 0.5, "top_p": 0.8}, P**2 * [0, 1, 0, 1, 0]),
        ({"temperature": 1e-300}, P * [0, 1, 0, 0, 0]),
    ],
)
def test_what_may_be_drawn(settings, weights):
    sampling = Sampling(**{"temperature": 1.0} | settings)
    probabilities = sampling.probabilities(LOGITS)
    np.testing.assert_allclose(probabilities, weights / weights.sum(), rtol=1e-5)
    both = sampling.probabilities(np.stack([LOGITS, LOGITS[::-1]]))
    np.testing.assert_allclose(both, [probabilities, probabilities[::-1]])


def test_what_may_be_drawn_is_what_hugging_face_draws():
    """Which tokens, and how likely each is (`tests/golden/llama/regenerate_sampling.py`)."""
    golden = np.load(GOLDEN)
    assert (golden["probabilities"] == 0).any(1).sum() > 30
    for settings, logits, wanted in zip(*(golden[name] for name in golden.files), strict=True):
        temperature, top_k, top_p = settings.tolist()
        probabilities = Sampling(temperature, int(top_k), top_p).probabilities(logits)
        np.testing.assert_allclose(probabilities, wanted, rtol=1e-12)


def test_tokens_that_are_equally_likely_stay_together_in_top_k():
    probabilities = Sampling(1.0, top_k=2).probabilities(np.float32([1, 0, 1, 1]))
    np.testing.assert_allclose(probabilities, [1 / 3, 0, 1 / 3, 1 / 3])
    np.testing.assert_allclose(Sampling(1.0, top_p=0.3).probabilities(np.zeros(4)), [0.5, 0.5, 0, 0])


def chi_square(tokens, p):
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[p == 0].sum() == 0
    expected = len(tokens) * p[p > 0]
    return ((counts[p > 0] - expected) ** 2 / expected).sum()


#: Of chi-square with 4 and with 2 degrees of freedom, once in a thousand.
RARE = {5: 18.47, 3: 13.82}


@pytest.mark.parametrize("settings", [{}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.8}])
def test_tokens_are_drawn_as_often_as_their_probability_says(settings):
    sampling, generator = Sampling(**{"temperature": 1.0} | settings), np.random.default_rng(5)
    p = sampling.probabilities(LOGITS)
    tokens = [sampling.choose(LOGITS, generator) for _ in range(5000)]
    assert chi_square(tokens, p) < RARE[int((p > 0).sum())]
    assert chi_square(tokens, (p > 0) / (p > 0).sum()) > 100


def test_drafts_change_no_distribution():
    """A wrong draft beside a likely one, and one after that: the token after the root is drawn all the same,
    and so is the one after it."""
    tree, sampling, generator = draft_tree(9, [[1, 2], [0]], 5), Sampling(1.0), np.random.default_rng(6)
    after = np.stack([LOGITS, LOGITS[::-1], LOGITS, LOGITS, LOGITS])
    texts = []
    for _ in range(5000):
        accepted = sampling.accept(tree, after, generator)
        kept = tree.tokens[0, accepted.path[0, 1 : accepted.counts[0]]].tolist()
        texts.append([*kept, int(accepted.next_tokens[0])])
    assert chi_square([text[0] for text in texts], P) < RARE[5]
    assert chi_square([text[1] for text in texts if text[0] == 1], P[::-1]) < RARE[5]


def test_greedy_is_the_default_and_draws_nothing():
    assert Sampling() == Sampling(temperature=0.0)
    generator = np.random.default_rng(0)
    assert {Sampling().choose(LOGITS, generator) for _ in range(50)} == {1}
    assert generator.random() == np.random.default_rng(0).random()


@pytest.mark.parametrize(
    "logits", [np.full(5, np.nan), np.float32([1, np.nan, 0, 0, 0]), np.full(5, -np.inf)]
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=3, top_p=0.9)])
def test_logits_that_are_no_numbers_are_refused(sampling, logits):
    """NumPy's argmax takes the first NaN for the largest number."""
    generator, tree = np.random.default_rng(0), draft_tree(9, [[1, 2]], 5)
    if sampling.temperature == 0 and not np.isnan(logits).any():
        assert sampling.choose(logits, generator) == 0
        return
    with pytest.raises(ArgumentError, match="logits are NaN at token [01]: |probabilities add up to nan"):
        sampling.choose(logits, generator)
    with pytest.raises(ArgumentError, match="logits are NaN at token [01]: |are no probabilities"):
        sampling.accept(tree, np.stack([logits] * 5), generator)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0: give a number from 0 on"),
        ({"temperature": math.nan}, "temperature nan: give"),
        ({"temperature": math.inf}, "temperature inf: give"),
        ({"temperature": 1.0, "top_k": -1}, "top_k -1: give a number of tokens, 0 for all"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p 0.0: give a probability above 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p 1.5: give a probability above 0"),
        ({"temperature": 1.0, "seed": -1}, "seed -1: give a whole number"),
        ({"top_k": 4}, "top_k and top_p say what may be drawn: give a temperature above 0 too"),
        ({"top_p": 0.9}, "give a temperature above 0 too"),
    ],
)
def test_settings_that_are_none(settings, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        Sampling(**settings)
