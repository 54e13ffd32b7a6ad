"""Command lines of one rank: valid ones over small files, and what becomes of a damaged one."""

import contextlib
import os
import shutil
from pathlib import Path

import numpy as np

from tests.command.launch import ROOT, in_process
from tests.command.test_verify_command import written
from tests.fuzz.limits import TooLong, limited_memory
from tests.support.models import write_model
from tests.unit.study import made_results
from treeattn.collectives import build
from treeattn.files import save_tensors

LINES = """
schedule k_nomial_tree:radix=3 --ranks 9 --result root --out a.txt --json a.json
schedule hierarchical --ranks 5 --nodes 3+2 --format svg --out a.svg
schedule uneven_nodes:nodes=3+2 --ranks 5 --format json
schedule own.json --format goal --heads 8 --head-dim 16 --out a.goal
simulate --cluster laptop --ranks 3 --schemes ring,own.json,k_ary_tree:radix=2 --json a.json
simulate --cluster dgx-h100 --ranks 16 --schemes ring --placement block,cyclic,suited
simulate --cluster leonardo --ranks 8 --arrivals late:20us --executor program
simulate --cluster dgx-h100 --ranks 8 --tokens 64k --kv-heads 4 --heads 8 --head-dim 64
simulate --cluster laptop --ranks 2 --placement 0+2 --arrivals 0+1us --schemes chain --format svg --out c
tune --cluster laptop --ranks 4 --placement cyclic --executor slots --out b.json
plot results.jsonl --figures time,relative --format svg,png --width 3in --baseline kv_ring --out f
report results.jsonl --cluster lumi --baseline kv_ring --out a.html
decode cache.safetensors --scheme hierarchical:nodes=1 --layout zigzag
decode cache.safetensors --repeat 2 --reproducible tokens --out a.safetensors --json a.json
verify drafts.safetensors --scheme ring --layout zigzag --owner round_robin --repeat 2 --out a.safetensors
generate --model . --prompt-ids 1,2,3 -n 3 --draft ngram
generate --model . --prompt-ids 1,2,3,4,5,6 --weights sharded --decode kv_ring
compare --schemes chain,ring --bytes 144,288 --head-dim 16 --repetitions 1 --out b
compare --schemes chain --seq-len 64:256:x2 --batch 1 --queries 2 --repetitions 1
compare --bytes 1Ki,4Ki --dtype float64 --repetitions 1
check-partials partial.safetensors --whole partial.safetensors --base 2
schemes --wide
""".strip().splitlines()


def seeds(folder: Path) -> list[bytes]:
    """The lines, and what they read in this folder."""
    write_model(folder, "tied")
    written(folder / "drafts.safetensors")
    made_results.write(folder / "results.jsonl", made_results.keys(tokens=[64]), 1)
    shutil.copy(ROOT / "tests/data/smollm2_layer17_4096.safetensors", folder / "cache.safetensors")
    partial = {"out": np.ones((4, 16), np.float32), "lse": np.ones(4, np.float32)}
    (folder / "partial.safetensors").write_bytes(save_tensors(partial, {}))
    (folder / "own.json").write_text(build("chain", 3).to_json())
    return [line.encode() for line in LINES]


def run(path: Path) -> None:
    """Beside the file that holds the line. What would take long, or much memory, is what was asked for."""
    words = path.read_bytes().replace(b"\0", b"").decode(errors="replace").split()
    if not words:  # the help
        return
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with contextlib.suppress(TooLong, MemoryError), limited_memory():
            done = in_process(*words, code=None, TREEATTN_CLUSTER="")
            assert done.returncode in (0, 1, 2), done
            assert done.returncode != 1 or done.stdout + done.stderr, done
            assert len(done.stderr) < 2000, done
            lines = [line for line in done.stderr.splitlines() if not line.startswith("treeattn: warning")]
            if done.returncode == 2:
                raise SystemExit("\n".join(lines))
    finally:
        os.chdir(here)
