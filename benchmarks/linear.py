"""Linear maps of a decoded token: python benchmarks/linear.py [--model DIR] [--json FILE]

How fast a matrix is read while it is multiplied with 1 to 16 vectors, by one thread, for each type of
weights: beside the fastest way to read it, and beside the slower of that and arithmetic alone, in turn; the
best of many counts. With --model what --weight-dtype int8 costs in logits: DIR's model says them after each
token of a text, with its weights as they are and rounded.

Goal: 85 percent of the read rate for 1 to 16 vectors.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import harness
import numpy as np
from mpi4py import MPI

from treeattn.backends.cpu import PlannedProduct, compile
from treeattn.backends.cpu.int8_rows import Int8Rows
from treeattn.llama import Llama, Session
from treeattn.llama.model import WEIGHT_DTYPES
from treeattn.llama.tokenizer import Tokenizer
from treeattn.study.roofline.cpu import DTYPES, Limits
from treeattn.study.roofline.reading import seconds

BYTES = 96 << 20  # of a matrix: more than caches hold
VECTORS = (1, 2, 4, 8, 16)
TEXT = Path(__file__).parents[1] / "README.md"
PROMPT, STEPS = 64, 192  # tokens of it


def product_rows(columns: int, repeats: int) -> list[dict[str, Any]]:
    limits, rows = Limits(compile.library(compile.chosen_isa())), []
    for dtype in (*DTYPES, *WEIGHT_DTYPES):
        matrix = drawn(dtype, columns)
        held = matrix.values if isinstance(matrix, Int8Rows) else matrix
        product, reading = PlannedProduct([matrix]), math.inf
        given = {count: np.ones((count, columns), np.float32) for count in VECTORS}
        taken = dict.fromkeys(VECTORS, math.inf)
        for _ in range(repeats):
            limits.run_arithmetic()
            reading = min(reading, limits.read_time(held, 1))
            for count, x in given.items():
                taken[count] = min(taken[count], seconds(functools.partial(product, x)))
        for count, best in taken.items():
            bound = max(reading, count * held.size / limits.multiply_add_rate)
            rows.append(
                {"dtype": dtype, "columns": columns, "vectors": count, "gb_s": held.nbytes / best / 1e9}
                | {"percent_of_read_rate": 100 * reading / best, "percent_of_bound": 100 * bound / best}
            )
            print("{dtype} x {vectors}: {percent_of_read_rate:.0f} % of reading, ".format(**rows[-1]), end="")
            print("{percent_of_bound:.0f} % of its bound".format(**rows[-1]))
    return rows


def drawn(dtype: str, columns: int) -> Any:
    """A matrix of random numbers, the same rows again and again."""
    block = np.random.default_rng(0).standard_normal((1024, columns), np.float32)
    if dtype in WEIGHT_DTYPES:
        made = Int8Rows.rounded(block)
        rows = BYTES // columns
        return Int8Rows(np.resize(made.values, (rows, columns)), np.resize(made.scales, rows))
    element = np.dtype(DTYPES[dtype])
    return np.resize(block.astype(element), (BYTES // columns // element.itemsize, columns))


def cost_in_logits(directory: Path) -> dict[str, Any]:
    said = {}
    for weight_dtype in (None, *WEIGHT_DTYPES):
        model = Llama(directory, weight_dtype=weight_dtype)
        tokens = Tokenizer(directory, model.config.vocab_size).encode(TEXT.read_text())[: PROMPT + STEPS]
        with Session(MPI.COMM_SELF, model, tokens[:PROMPT], capacity=len(tokens)) as session:
            logits = [session.prefill(), *(session.step(token) for token in tokens[PROMPT:])]
        said[weight_dtype] = np.array(logits, np.float64)
    plain, rounded = said[None], said["int8"]
    logs = [one - np.log(np.exp(one).sum(axis=-1, keepdims=True)) for one in (plain, rounded)]
    made = {
        "tokens": len(plain),
        "largest_difference": np.abs(plain - rounded).max(),
        "mean_difference": np.abs(plain - rounded).mean(),
        "deviation_of_logits": plain.std(),
        "kl_divergence": (np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=-1).mean(),
        "same_likeliest": (plain.argmax(axis=-1) == rounded.argmax(axis=-1)).mean(),
    }
    print("int8 in logits: " + ", ".join(f"{name} {value:.4g}" for name, value in made.items()))
    return made


def main() -> None:
    options = harness.options(__doc__, model=Path, columns=576, repeats=40)
    command = "python benchmarks/linear.py" + " --model DIR" * bool(options.model)
    facts = harness.source(command) | {"isa": compile.chosen_isa()}
    facts["rows"] = product_rows(options.columns, options.repeats)
    if options.model:
        facts["logits"] = cost_in_logits(options.model)
    options.write(facts)


if __name__ == "__main__":
    main()
