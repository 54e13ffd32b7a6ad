"""How Hugging Face's model goes on, greedily, whatever its end of text."""

from typing import Any

import torch


def continuation(model: Any, prompt: list[int], steps: int) -> tuple[list[int], Any]:
    """The tokens it chose after the prompt, and its logits in each step, [steps, vocabulary]."""
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return made.sequences[0, len(prompt) :].tolist(), torch.stack(made.logits).squeeze(1)
