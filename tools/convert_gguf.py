"""Turn a Llama in a GGUF file into a model directory: python tools/convert_gguf.py MODEL.gguf DIR [DTYPE]

Needs the extra ``models``. Weights are dequantised to float32, then rounded where DTYPE is float16 or
bfloat16. GGUF stores the rows of q and k of a Llama in
the order of interleaved rotary positions; here the halves of a head are rotated against each other, so they
are put back. The tokenizer is written as tokenizer.json (byte-level BPE only).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, GGUFValueType, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CONTROL = 3  # type of a token that stands for itself, such as the end of a text


class WholeReader(GGUFReader):
    """Ends where the file does. The library reads nothing there, 10^18 times if a damaged length says so."""

    def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **orders: Any) -> Any:
        values = super()._get(offset, dtype, count, *order, **orders)
        if len(values) < count:
            raise ValueError(f"it ends at byte {len(self.data)}, and says that more follows")
        return values

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """An array at once. The library takes 50 us for each element, hours if a length is damaged."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        of, begin = GGUFValueType(kind[0]), orig_offs + 12
        if of == GGUFValueType.STRING:
            values, end = self._strings(begin, int(length[0]))
        elif of in self.gguf_scalar_to_np:
            values = [self._get(begin, self.gguf_scalar_to_np[of], length[0])]
            end = begin + values[0].nbytes
        else:
            raise ValueError("it has an array of arrays, as no Llama here does")
        where = list(range(2, 2 + len(values)))
        return end - orig_offs, [kind, length, *values], where, [GGUFValueType.ARRAY, of]

    def _strings(self, at: int, count: int) -> tuple[list[Any], int]:
        """So many from a byte on, and the byte behind them."""
        whole, found = memoryview(self.data), []
        order = {"little": "big", "big": "little"}[sys.byteorder] if self.byte_order == "S" else sys.byteorder
        for _ in range(count):
            begin = at + 8
            at = begin + int.from_bytes(whole[at:begin], order)
            if at > len(whole) or begin > len(whole):
                raise ValueError(f"it ends at byte {len(whole)}, and says that more follows")
            found.append(whole[begin:at])
        return found, at


def main() -> None:
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], *([name] for name in DTYPES)):
        raise SystemExit(f"usage: {sys.argv[0]} MODEL.gguf DIRECTORY [{'|'.join(DTYPES)}]")
    source, directory = Path(sys.argv[1]), Path(sys.argv[2])
    dtype = (*sys.argv[3:], "float32")[0]
    if not source.is_file():
        raise SystemExit(f"{source}: no such file")
    try:
        reader = WholeReader(source)
        config = read_config(reader, source) | {"torch_dtype": dtype}
        tensors, words = dict(renamed(tensor, config) for tensor in reader.tensors), tokenizer(reader, source)
    except Exception as error:  # from the library, of many types: other bytes, or too few
        raise SystemExit(
            f"{source}: is not a whole GGUF file ({str(error) or type(error).__name__!r:.200})"
        ) from None
    tensors = {name: values.astype(DTYPES[dtype]) for name, values in tensors.items()}
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    for kind, part in (("attention_bias", "self_attn"), ("mlp_bias", "mlp")):
        config[kind] = any(f".{part}." in name and name.endswith(".bias") for name in tensors)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    words.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    print(f"{directory}: {len(tensors)} tensors, {sum(one.nbytes for one in tensors.values()):,} bytes")


def field(reader: Any, name: str, default: Any = None) -> Any:
    """What the file says under a name. Ends the program where it must say something."""
    if name in reader.fields:
        return reader.fields[name].contents()
    if default is None:
        raise SystemExit(f"the file does not say {name}")
    return default


def read_config(reader: Any, source: Path) -> dict[str, Any]:
    """config.json, in the dialect of published Llamas."""
    architecture = field(reader, "general.architecture")
    if architecture != "llama":
        raise SystemExit(f"{source}: is a {architecture!r:.80}, only llama is served")
    scaled = any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors)  # Llama 3.1's way
    if scaled or "llama.rope.scaling.type" in reader.fields:
        raise SystemExit(f"{source}: scales its rotary positions, which this converter does not carry over")
    hidden, heads = field(reader, "llama.embedding_length"), field(reader, "llama.attention.head_count")
    end = field(reader, "tokenizer.ggml.eos_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv", heads),
        "head_dim": field(reader, "llama.attention.key_length", hidden // heads),
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens")),
        "max_position_embeddings": field(reader, "llama.context_length"),
        "rms_norm_eps": float(field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(field(reader, "llama.rope.freq_base", 10000.0)),
        "eos_token_id": end,
    }


def renamed(tensor: Any, config: dict[str, Any]) -> tuple[str, Any]:
    """Name and float32 values of a tensor as a model directory has them."""
    values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
    if tensor.name in WHOLE:
        return WHOLE[tensor.name], values
    _, layer, part, kind = [*tensor.name.split("."), "", "", ""][:4]
    if part not in BLOCK:
        raise SystemExit(f"the file has a tensor {tensor.name!r:.80}, which a Llama here does not have")
    if part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
    return f"model.layers.{layer}.{BLOCK[part]}.{kind}", values


def tokenizer(reader: Any, source: Path) -> Tokenizer:
    """Byte-level BPE as GPT-2 has it, digits one by one where the file asks for it."""
    if field(reader, "tokenizer.ggml.model") != "gpt2":
        raise SystemExit(f"{source}: its tokenizer is no byte-level BPE, which is all that is served")
    tokens = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field(reader, "tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    splits = field(reader, "tokenizer.ggml.pre", "gpt-2")
    if splits not in ("gpt-2", "smollm"):
        raise SystemExit(
            f"{source}: its tokenizer splits words as {splits!r:.80}, only gpt-2 and smollm are served"
        )
    if field(reader, "tokenizer.ggml.add_bos_token", False):
        raise SystemExit(f"{source}: its tokenizer puts a token before each text, which is not carried over")
    if splits == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    kinds = field(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return made


if __name__ == "__main__":
    main()
