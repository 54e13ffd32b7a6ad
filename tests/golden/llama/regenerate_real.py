"""Ask Hugging Face how a real model goes on: python tests/golden/llama/regenerate_real.py MODEL_DIRECTORY

MODEL_DIRECTORY is the model of `make generate-demo` (SmolLM2-135M-Instruct, converted). Needs the extra
`oracle`. smollm2_135m.json beside it holds a prompt, which stays, the 64 tokens that it chose after it, and
by how much the likeliest logit was ahead of the next at the closest of these choices. The prompt is 400
tokens of a page, as notes of another day, and then the wish for a story about an ant.
"""

import json
import sys
from pathlib import Path

import torch
from continuation import continuation
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

FACTS = Path(__file__).with_name("smollm2_135m.json")
STEPS = 64


def main() -> None:
    directory = Path(sys.argv[1])
    prompt = json.loads(FACTS.read_text())["prompt"]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens, logits = continuation(model, prompt, STEPS)
    best = logits.topk(2).values
    facts = {"prompt": prompt, "tokens": tokens, "closest": float((best[:, 0] - best[:, 1]).min())}
    FACTS.write_text(json.dumps(facts) + "\n")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    print(tokenizer.decode(facts["tokens"]), facts["closest"])


if __name__ == "__main__":
    main()
