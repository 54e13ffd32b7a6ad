"""Ask Hugging Face what may be drawn: python tests/golden/llama/regenerate_sampling.py

Needs the extra `oracle`; what it said is committed beside it, in sampling.npz: temperature, top_k (0: all)
and top_p of each case [cases, 3], logits [cases, vocabulary], and the probabilities, float64, after the
warpers of `generate`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

HERE = Path(__file__).parent
CASES, VOCABULARY = 40, 60


def warped(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    scores = torch.tensor(logits, dtype=torch.float64)[None]
    warpers = [TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)]
    if top_k:
        warpers.insert(1, TopKLogitsWarper(top_k))
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)[0].numpy()


def main() -> None:
    rng = np.random.default_rng(11)
    logits = (3 * rng.standard_normal((CASES, VOCABULARY))).astype(np.float32)
    logits[::4, 7] = logits[::4].max(1)  # two that are equally likely
    settings = np.stack(
        [rng.uniform(0.2, 2, CASES), rng.integers(0, 30, CASES), rng.uniform(0.1, 1, CASES)], 1
    )
    settings[1::4, 1] = 0
    probabilities = [warped(x, t, int(k), p) for x, (t, k, p) in zip(logits, settings, strict=True)]
    np.savez_compressed(
        HERE / "sampling.npz", settings=settings, logits=logits, probabilities=np.stack(probabilities)
    )


if __name__ == "__main__":
    main()
