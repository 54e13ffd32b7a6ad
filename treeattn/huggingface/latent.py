"""Latents of DeepSeek's kind: what a model caches in place of the keys and values that it makes of them.

A layer's keys are linear in its latents, k = W_k c for the channels without positions and the rest as it is,
and so are its values, v = W_v c. So q k = (W_k^T q) c: queries are turned instead of keys, all heads attend
to the latents themselves as one head of keys whose first channels are the values, and W_v turns the result.
"""

from __future__ import annotations

from typing import Any

import torch

from treeattn.errors import ArgumentError


class Latents:
    """The latents of one layer: [batch, 1, tokens, rank] and rotated keys [batch, 1, tokens, rope] of new
    tokens, and the weight that makes keys and values of them."""

    def __init__(self, module: Any, latents: torch.Tensor, rotated: torch.Tensor) -> None:
        self._given = latents, rotated
        self.rank = latents.shape[3]
        rows = module.kv_b_proj.weight.detach().unflatten(
            0, (-1, module.qk_nope_head_dim + module.v_head_dim)
        )
        self._keys, self._values = rows.split([module.qk_nope_head_dim, module.v_head_dim], 1)

    def together(self) -> torch.Tensor:
        """[batch, 1, tokens, rank + rope], as they are cached."""
        return torch.cat(self._given, 3)

    def are(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether the last token's keys and values are made as it is said here: not of every model."""
        latents, rotated = (one[:, :, -1:] for one in self._given)
        made = latents @ self._keys.mT, rotated.expand(-1, key.shape[1], -1, -1)
        wanted = torch.cat(made, 3), latents @ self._values.mT
        near = torch.finfo(key.dtype).eps ** 0.75
        for made, given in zip(wanted, (key[:, :, -1:], value[:, :, -1:]), strict=True):
            if made.shape != given.shape or (made - given).abs().max() > near * given.abs().max():
                return False
        return True

    def turned(self, query: torch.Tensor) -> torch.Tensor:
        """Queries [batch, heads, tokens, nope + rope] to latents: [.., rank + rope]."""
        nope = self._keys.shape[1]
        plain, rotated = query[..., :nope], query[..., nope:]
        return torch.cat([plain @ self._keys, rotated], 3)

    def values(self, out: torch.Tensor) -> torch.Tensor:
        """Results over latents [batch, tokens, heads, rank] as values [.., v_head_dim]."""
        values: torch.Tensor = self._values.to(out.dtype)
        return (out.transpose(1, 2) @ values.mT).transpose(1, 2)


def of(
    module: Any, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Latents | None:
    """The latents of which `module` has made key and value, if they are what `layer` is to hold: None where
    weights are tensor parallel, or the model is traced, or they are made otherwise.

    Raises `ArgumentError` where the layer holds keys and values that would be others now: transformers makes
    them of all latents in each step, by the adapters of that step.
    """
    made_by = type(getattr(module, "kv_b_proj", None))
    if torch.compiler.is_compiling() or not layer.given:
        return None
    plain = made_by is torch.nn.Linear and module.kv_b_proj.bias is None
    if plain and not layer.is_part(query.shape[1]):
        latents = Latents(module, *layer.given)
        if layer.rank if layer.held else latents.are(key, value):
            return latents
    if not (layer.rank and layer.held):
        _check_as_before(module, layer, key, value)
    return None


@torch.no_grad()
def _check_as_before(module: Any, layer: Any, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise `ArgumentError` unless `module` makes the same of the first token as it did, and of the last one
    without those between. Of one sequence: the rows of a batch are reordered."""
    given, made = layer.given, (key, value)
    if layer.held == 0 or layer.first is None:
        layer.first = [one[:1, :, :1].clone() for one in (*given, *made)]
    last = [one[:1, :, -1:] for one in (*given, *made)]
    both = [torch.cat(pair, 2) for pair in zip(layer.first, last, strict=True)]
    near = torch.finfo(key.dtype).eps ** 0.75
    for again, wanted in zip(module.expand_kv(*both[:2]), both[2:], strict=True):
        if (again - wanted).abs().max() > near * wanted.abs().max():
            raise ArgumentError(
                f"kv_b_proj of {type(module).__name__} makes other keys of a token than before (an adapter "
                "was switched: reset() the cache), or than beside others (it is quantized by the range of "
                "all: not served)"
            )
