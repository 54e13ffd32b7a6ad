"""Ask Hugging Face how a real model goes on: python tests/golden/llama/regenerate_real.py MODEL_DIRECTORY

MODEL_DIRECTORY is the model of `make generate-demo` (SmolLM2-135M-Instruct, converted). Needs the extra
`oracle`. What it said is committed beside it, in smollm2_135m.json: a prompt, the 64 tokens that it chose
after it, and by how much the likeliest logit was ahead of the next at the closest of these choices.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from continuation import continuation
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
PAGE, STEPS = 400, 64
AROUND = (
    "<|im_start|>system\nNotes of another day:\n",
    "<|im_end|>\n<|im_start|>user\nForget the notes. "
    "Tell me a story about an ant who climbs an oak.<|im_end|>\n<|im_start|>assistant\nOnce upon a time,",
)


def main() -> None:
    directory = Path(sys.argv[1])
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    page = tokenizer.encode((HERE.parents[2] / "docs/two-trees.md").read_text()).ids[:PAGE]
    before, after = (tokenizer.encode(text).ids for text in AROUND)
    prompt = before + page + after
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens, logits = continuation(model, prompt, STEPS)
    best = logits.topk(2).values
    facts = {
        "prompt": prompt,
        "tokens": tokens,
        "closest": float((best[:, 0] - best[:, 1]).min()),
    }
    (HERE / "smollm2_135m.json").write_text(json.dumps(facts) + "\n")
    print(tokenizer.decode(facts["tokens"]), facts["closest"])


if __name__ == "__main__":
    main()
