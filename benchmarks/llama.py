"""A decoded token beside Hugging Face's: python benchmarks/llama.py --model DIR --oracle PYTHON [--json FILE]

`transformers` on the processor and `treeattn generate`, one after the other and again, each in processes of
its own, with the same total threads: two, on 1 rank with two BLAS and attention threads, on 2 ranks with one
each. The same random prompt, the same number of tokens, greedily; float32. PYTHON: one that has the extra
`oracle`.
Goal: faster than it per decoded token at 2 ranks once weights are sharded, not slower at 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from treeattn.study import environment

HUGGING_FACE = """
import json, sys, time
import numpy as np, torch
from transformers import AutoModelForCausalLM
directory, prompt, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(2)
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
ids = torch.tensor(np.random.default_rng(0).integers(0, model.config.vocab_size, prompt))[None]
with torch.no_grad():
    began = time.perf_counter()
    made = model(ids, use_cache=True, logits_to_keep=1)
    token = made.logits[0, -1].argmax()
    first, steps, tokens = time.perf_counter() - began, [], [int(token)]
    for _ in range(count - 1):
        began = time.perf_counter()
        made = model(token[None, None], past_key_values=made.past_key_values, use_cache=True)
        token = made.logits[0, -1].argmax()
        tokens.append(int(token))
        steps.append(time.perf_counter() - began)
print(json.dumps({"first_token_s": first, "step_s": steps, "tokens": tokens}))
"""


def hugging_face(options: argparse.Namespace) -> dict[str, Any]:
    words = [options.oracle, "-c", HUGGING_FACE, options.model, str(options.prompt), str(options.tokens)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def ours(options: argparse.Namespace, ranks: int, decode: str) -> dict[str, Any]:
    threads = str(2 // ranks)
    settings = {"OPENBLAS_NUM_THREADS": threads, "TREEATTN_THREADS": threads}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "facts.json"
        words = [
            *("mpiexec", "-n", str(ranks), sys.executable, "-m", "treeattn", "generate", "--ignore-eos"),
            *("--model", options.model, "--random-tokens", str(options.prompt), "--decode", decode),
            *("-n", str(options.tokens), "--json", str(out)),
        ]
        subprocess.run(words, capture_output=True, check=True, env=os.environ | settings)
        facts = json.loads(out.read_text())
    return {
        "first_token_s": facts["first_token_s"][0],
        "step_s": facts["step_s"][0],
        "tokens": facts["tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--oracle", default=sys.executable)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = {
        "transformers": lambda: hugging_face(options),
        "1 rank, tree": lambda: ours(options, 1, "tree"),
        "2 ranks, tree": lambda: ours(options, 2, "tree"),
        "2 ranks, kv_ring": lambda: ours(options, 2, "kv_ring"),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for _ in range(options.repeats):
        for name, run in cases.items():
            found[name].append(run())
    rows = []
    for name, runs in found.items():
        steps = [step for run in runs for step in run["step_s"]]
        rows.append(
            {
                "case": name,
                "first_token_s": statistics.median(run["first_token_s"] for run in runs),
                "step_ms": statistics.median(steps) * 1e3,
                "same_tokens": all(run["tokens"] == found["transformers"][0]["tokens"] for run in runs),
            }
        )
        told = "the same" if rows[-1]["same_tokens"] else "OTHER"
        first, step = rows[-1]["first_token_s"], rows[-1]["step_ms"]
        print(f"{name:20s} first token {first:7.2f} s, then {step:7.1f} ms each, {told} tokens")
    if options.json:
        facts = {
            "software": environment.software(),
            "cpu": environment.cpu_name(),
            "prompt": options.prompt,
            "tokens": options.tokens,
            "rows": rows,
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
