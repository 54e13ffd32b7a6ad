"""Ask Hugging Face for the logits of the tiny models: python tests/golden/llama/regenerate.py

Needs the extra `oracle`; what it said is committed beside it, in logits.npz: for each model the tokens it
chose after the prompt, and the logits of the first steps.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from continuation import continuation
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))
from tests.support.models import MODELS, PROMPT, write_model  # noqa: E402

STEPS, KEPT, SHORT = 16, 6, 3


def main() -> None:
    found = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as directory:
            path = write_model(Path(directory), name)
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            )
            tokens, logits = continuation(model, list(PROMPT), STEPS)
            short = torch.tensor(PROMPT[:SHORT])[None]
            with torch.no_grad():
                found[f"{name}.short"] = model(short).logits[0, -1].numpy()
        found[f"{name}.tokens"] = np.array(tokens)
        found[f"{name}.logits"] = logits.numpy()[:KEPT]
        print(name, found[f"{name}.tokens"].tolist(), np.abs(found[f"{name}.logits"]).max())
    np.savez_compressed(HERE / "logits.npz", **found)


if __name__ == "__main__":
    main()
