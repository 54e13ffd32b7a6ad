"""A decoded token beside Hugging Face's: python benchmarks/llama.py --model DIR --oracle PYTHON [--json FILE]

`transformers` on the processor and `treeattn generate`, one after the other and again, each in processes
of its own, with the same total threads: two. On a busy machine two threads wait for each other, so
`transformers` on one is there as well. The same random prompt, the same number of tokens, greedily, in the
type of DIR's weights, and once rounded to int8; tokens of 16-bit weights may differ, since `transformers`
rounds every step. Between them two threads read as many bytes as weights and cache are, by the fastest way
of `treeattn roofline`. And attention alone with its communication, a token of all layers, on 4 ranks, by tree
and by ring in turn.
PYTHON: one that has the extra `oracle`. With --llama-cpp PYTHON --gguf FILE llama.cpp runs too, by
llama-cpp-python 0.3.36: its file of 4 bits as it is, and widened to bfloat16.

Goals: of 16-bit weights at most 1.4 times what reading takes, on 1 rank and on 2 with sharded weights;
faster than `transformers` per decoded token on 2 ranks with sharded weights, not slower on 1;
attention 3 times as fast by tree as by kv_ring; a rank's memory below its weights, its share of the cache,
10 percent and 200 MB.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import numpy as np

from treeattn import Decoder
from treeattn.llama import read_config
from treeattn.study.roofline.reading import fastest_reader

HUGGING_FACE = """
import json, sys, time
import numpy as np, torch
from transformers import AutoModelForCausalLM
directory, prompt, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(int(sys.argv[4]))
model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
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
#: Of a file of 4 bits the same weights in bfloat16 too, as llama.cpp widens them.
LLAMA_CPP = """
import ctypes, json, sys, tempfile, time
import llama_cpp, numpy as np
file, kind, prompt, count, threads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
with tempfile.TemporaryDirectory() as folder:
    if kind == "bfloat16":
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype, how.allow_requantize, given = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, True, file
        file = folder + "/wide.gguf"
        if llama_cpp.llama_model_quantize(given.encode(), file.encode(), ctypes.byref(how)):
            sys.exit("llama.cpp cannot widen this file")
    model = llama_cpp.Llama(
        file, n_ctx=prompt + count, n_threads=threads, n_threads_batch=threads, verbose=False
    )
ids = np.random.default_rng(0).integers(0, model.n_vocab(), prompt).tolist()
began = time.perf_counter()
model.eval(ids)
def said():
    logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())
tokens = [said()]
first, steps = time.perf_counter() - began, []
for _ in range(count - 1):
    began = time.perf_counter()
    model.eval(tokens[-1:])
    tokens.append(said())
    steps.append(time.perf_counter() - began)
print(json.dumps({"first_token_s": first, "step_s": steps, "tokens": tokens}))
"""
LEFT_OVER = 1.1, 200e6  # what a rank may need beside weights and cache


def theirs(options: argparse.Namespace, words: list[str], threads: int) -> dict[str, Any]:
    """What a program of theirs says of so many tokens."""
    words = [*words, *(str(n) for n in (options.prompt, options.tokens, threads))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def job(ranks: int, *words: str) -> None:
    """Two threads together, or one for each rank."""
    threads = str(max(1, 2 // ranks))
    settings = {"OPENBLAS_NUM_THREADS": threads, "TREEATTN_THREADS": threads}
    command = ["mpiexec", "-n", str(ranks), sys.executable, *words]
    subprocess.run(command, capture_output=True, check=True, env=os.environ | settings)


def ours(options: argparse.Namespace, ranks: int, *more: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "facts.json"
        words = ["-m", "treeattn", "generate", "--ignore-eos", "--model", options.model, *more]
        words += ["--random-tokens", str(options.prompt), "-n", str(options.tokens), "--json", str(out)]
        job(ranks, *words)
        facts = json.loads(out.read_text())
    held = zip(facts["weight_bytes"], facts["cache_bytes"], strict=True)
    allowed = [LEFT_OVER[0] * (weights + cache) + LEFT_OVER[1] for weights, cache in held]
    return {
        "first_token_s": facts["first_token_s"][0],
        "step_s": facts["step_s"][0],
        "tokens": facts["tokens"],
        "peak_bytes": max(facts["peak_bytes"]),
        "read_bytes": sum(facts["cache_bytes"]) + facts["weight_bytes"][0],
        "within_memory": all(peak <= most for peak, most in zip(facts["peak_bytes"], allowed, strict=True)),
    }


def beside_others(options: argparse.Namespace) -> list[dict[str, Any]]:
    transformers = [options.oracle, "-c", HUGGING_FACE, options.model]
    llama_cpp = [options.llama_cpp, "-c", LLAMA_CPP, str(options.gguf)]
    cases = {
        "transformers, 2 threads": lambda: theirs(options, transformers, 2),
        "transformers, 1 thread": lambda: theirs(options, transformers, 1),
        "1 rank": lambda: ours(options, 1),
        "2 ranks, weights replicated": lambda: ours(options, 2),
        "2 ranks, weights sharded": lambda: ours(options, 2, "--weights", "sharded"),
        "1 rank, weights in int8": lambda: ours(options, 1, "--weight-dtype", "int8"),
        "2 ranks, weights sharded, in int8": lambda: ours(
            options, 2, "--weights", "sharded", "--weight-dtype", "int8"
        ),
    }
    if options.gguf:
        cases["llama.cpp, 2 threads"] = lambda: theirs(options, [*llama_cpp, "bfloat16"], 2)
        cases["llama.cpp, its file of 4 bits, 2 threads"] = lambda: theirs(options, [*llama_cpp, "4"], 2)
    sizes: dict[str, int] = {}

    def measured(name: str) -> dict[str, Any]:
        made = cases[name]()
        sizes[name] = made.get("read_bytes", 0)
        return made

    steps = {name: functools.partial(measured, name) for name in cases}
    read = {name: lambda name=name: reading_ms(sizes[name]) for name in ("1 rank", "1 rank, weights in int8")}
    found = harness.in_turn(steps | {f"reading, {name}": run for name, run in read.items()}, options.repeats)
    reading = {name: found.pop(f"reading, {name}") for name in read}
    for name, times in reading.items():
        print(f"{name}: reading it all once {statistics.median(times):.1f} ms (at best {min(times):.1f})")
    wanted = found["transformers, 2 threads"][0]["tokens"]
    plain, rounded = reading.values()
    return [
        row(name, runs, wanted) | {"reading_ms": rounded if "int8" in name else plain}
        for name, runs in found.items()
    ]


def reading_ms(size: int, threads: int = 2) -> float:
    """How long so many bytes take, at best of a few times."""
    array = np.ones(size // 4, np.float32)
    reader = fastest_reader(array[: 1 << 24])
    return min(reader.seconds(array, threads) for _ in range(5)) * 1e3


def row(name: str, runs: list[dict[str, Any]], wanted: list[int]) -> dict[str, Any]:
    medians = [statistics.median(run["step_s"]) * 1e3 for run in runs]
    made = {
        "case": name,
        "first_token_s": statistics.median(run["first_token_s"] for run in runs),
        "step_ms": statistics.median(medians),
        "step_ms_by_run": medians,
        "step_ms_fastest": min(step for run in runs for step in run["step_s"]) * 1e3,
        "same_tokens": all(run["tokens"] == wanted for run in runs),
    }
    told = "the same" if made["same_tokens"] else "OTHER"
    print(
        f"{name:40s} first token {made['first_token_s']:7.2f} s, then {made['step_ms']:7.1f} ms each "
        f"(at best {made['step_ms_fastest']:.1f}), {told} tokens"
    )
    if "peak_bytes" in runs[0]:
        made["peak_bytes"] = max(run["peak_bytes"] for run in runs)
        made["within_memory"] = all(run["within_memory"] for run in runs)
        print(
            f"{'':40s} at most {made['peak_bytes']:,} bytes a rank, within the goal: {made['within_memory']}"
        )
    return made


def attention_alone(directory: str, tokens: int, turns: int, out: Path) -> None:
    """One rank of the job that measures attention: a token is a step of every layer."""
    from mpi4py import MPI

    comm, config = MPI.COMM_WORLD, read_config(directory)
    rng, share = np.random.default_rng(comm.rank), tokens // comm.size
    kv = rng.standard_normal((config.layers, 2, 1, share, config.kv_heads, config.head_dim), np.float32)
    q = np.random.default_rng(99).standard_normal((1, 1, config.heads, config.head_dim), np.float32)
    plan = {"heads": config.heads, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    decoders = {
        name: Decoder(comm, dtype="float32", scheme=name, **plan) for name in ("hierarchical", "kv_ring")
    }

    def token(decoder: Decoder) -> float:
        return 1e3 * harness.of_slowest(comm, lambda: [decoder(q, k, v) for k, v in kv])

    steps = {name: functools.partial(token, decoder) for name, decoder in decoders.items()}
    times = harness.in_turn(steps, turns, warm=2)
    for decoder in decoders.values():
        decoder.close()
    if comm.rank == 0:
        out.write_text(json.dumps(times))


def attention(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        words = [__file__, "--model", options.model, "--prompt", str(options.prompt)]
        job(4, "-m", "mpi4py", *words, "--attention", str(out), "--turns", str(options.turns))
        times = json.loads(out.read_text())
    made: dict[str, Any] = {"ranks": 4, "tokens": options.prompt}
    for name, taken in times.items():
        made[name] = {"ms": statistics.median(taken), "ms_fastest": min(taken), "turns": len(taken)}
    tree, ring = made["hierarchical"], made["kv_ring"]
    made["ring / tree"] = ring["ms"] / tree["ms"]
    made["ring / tree, fastest"] = ring["ms_fastest"] / tree["ms_fastest"]
    print(
        f"attention and its communication, 4 ranks, ms a token (at best): tree {tree['ms']:.2f} "
        f"({tree['ms_fastest']:.2f}), ring {ring['ms']:.2f} ({ring['ms_fastest']:.2f}): "
        f"{made['ring / tree']:.1f} x"
    )
    return made


def main() -> None:
    options = harness.options(
        __doc__,
        model={"required": True},
        oracle=sys.executable,
        llama_cpp={"default": sys.executable, "help": "a Python with llama-cpp-python"},
        gguf={"help": "the same model for llama.cpp, of 4 bits"},
        note={"default": "", "help": "such as what else the machine does; it is kept"},
        attention={"type": Path, "help": argparse.SUPPRESS},
        prompt=4096,
        tokens=16,
        repeats=3,
        turns=20,
    )
    if options.attention:
        attention_alone(options.model, options.prompt, options.turns, options.attention)
        return
    command = "python benchmarks/llama.py --model DIR --oracle PYTHON"
    facts = harness.source(command + " --llama-cpp PYTHON --gguf FILE" * bool(options.gguf))
    facts |= {name: options.asked[name] for name in ("note", "prompt", "tokens", "repeats")}
    facts |= {"cores": len(os.sched_getaffinity(0)), "attention": attention(options)}
    options.write(facts | {"rows": beside_others(options)})


if __name__ == "__main__":
    main()
