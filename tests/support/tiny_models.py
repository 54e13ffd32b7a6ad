"""Models of transformers with few, drawn weights, and what they do by themselves to compare with."""

from typing import Any

import torch
import transformers

torch.set_num_threads(1)  # ranks outnumber cores

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WINDOW = {"sliding_window": 7}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}

#: Of each family its configuration's name, and what is not `_COMMON` about it.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Mistral": ("Mistral", _WINDOW),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {}),
    "Qwen3 with windows": ("Qwen3", {"use_sliding_window": True, "max_window_layers": 2} | _WINDOW),
    "Qwen3-MoE": ("Qwen3Moe", _EXPERTS),
    "Gemma 2": ("Gemma2", {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0} | _WINDOW),
    "Gemma 3": ("Gemma3Text", _ALTERNATING | _WINDOW),
    "Gemma 3n": (
        "Gemma3nText",
        {
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        }
        | _ALTERNATING
        | _WINDOW,
    ),
    "GPT-OSS": ("GptOss", {"num_local_experts": 4} | _WINDOW),
    "Phi-3": ("Phi3", {}),
    "Phi-3.5-MoE": ("Phimoe", {"num_local_experts": 4} | _WINDOW),
    "Qwen2-MoE": ("Qwen2Moe", {"shared_expert_intermediate_size": 32} | _EXPERTS),
    "Granite": ("Granite", {"attention_multiplier": 0.2}),
    "OLMo-2": ("Olmo2", {}),
    "Cohere2": ("Cohere2", _ALTERNATING | _WINDOW),
    "GPT-NeoX": ("GPTNeoX", {}),
    "GPT-2": ("GPT2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}),
    "DeepSeek-V3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "n_routed_experts": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 2,
        },
    ),
    "Qwen3-Next": ("Qwen3Next", _EXPERTS),
    "StableLM": ("StableLm", {}),
    "OPT": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "Starcoder2": ("Starcoder2", _WINDOW),
    "Nemotron": ("Nemotron", {}),
    "GLM-4": ("Glm4", {}),
    "Ernie 4.5": ("Ernie4_5", {}),
    "SmolLM3": ("SmolLM3", {}),
    "OLMo-3": ("Olmo3", _ALTERNATING | _WINDOW),
    "EXAONE-4": ("Exaone4", _ALTERNATING | _WINDOW),
    "Gemma 4": (
        "Gemma4Text",
        {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16, "global_head_dim": 32}
        | _ALTERNATING
        | _WINDOW,
    ),
    "Jamba": (
        "Jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False}
        | _EXPERTS,
    ),
    "BioGPT": ("BioGpt", {}),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
}


#: Heads of 64 channels, and latents of 512 and 64: widths for which there are kernels on a GPU.
_WIDE = {"head_dim": 64, "hidden_size": 256, "n_embd": 256}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}


def wide(family: str, attention: str = "eager", dtype: Any = torch.float32, **more: Any) -> Any:
    """One that a GPU serves."""
    return made(family, attention, dtype, **_WIDE, **(_LATENT if family == "DeepSeek-V3" else {}), **more)


def made(family: str, attention: str = "eager", dtype: Any = torch.float32, **more: Any) -> Any:
    """A model of this family, or of the configuration of this name, the same whenever it is made. Weights of
    a fresh model say too little, since logits are nearly all alike: they are drawn larger."""
    kind, given = FAMILIES.get(family, (family, {}))
    configuration = getattr(transformers, f"{kind}Config")
    named = {
        name: value
        for name, value in (_COMMON | given | more).items()
        if not isinstance(getattr(configuration, name, None), property)
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        configuration(**named), attn_implementation=attention, dtype=dtype
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=1.0 if name.endswith("sinks") else 0.15)
    return model.eval()


def prompt(batch: int = 1, tokens: int = 30, seed: int = 3) -> torch.Tensor:
    """Ids [batch, tokens], the same on every rank."""
    return torch.randint(2, 97, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def padded(ids: torch.Tensor) -> torch.Tensor:
    """An attention mask that pads every row but the first on the left."""
    mask = torch.ones_like(ids)
    for row in range(1, len(ids)):
        mask[row, : 5 * row % 25] = 0
    return mask


@torch.no_grad()
def logits_of(model: Any, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Of all tokens: a chunk, another one, then one by one, as a loop without generate() does it."""
    chunks, logits, done = [17, 6, *[1] * (ids.shape[1] - 23)], [], 0
    for count in chunks:
        given: dict[str, Any] = {}
        if mask is not None:
            places = (mask.cumsum(1) - 1).clamp(0)[:, done : done + count]
            given = {"attention_mask": mask[:, : done + count], "position_ids": places}
        logits.append(model(ids[:, done : done + count], past_key_values=cache, **given).logits)
        done += count
    return torch.cat(logits, 1)


def assert_close(got: torch.Tensor, wanted: torch.Tensor, real: Any = slice(None)) -> None:
    """Within 1e-5 of the largest."""
    assert (got - wanted)[real].abs().max() <= 1e-5 * wanted.abs().max()


def tensor_parallel(folder: str) -> Any:
    """A saved model, its weights split over the ranks of torch's default process group."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, tp_plan="auto", attn_implementation="treeattn", dtype=torch.float32
    ).eval()
