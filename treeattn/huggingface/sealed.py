"""Tensors on their way through a model to "treeattn": code that computes with them before fails at once."""

from __future__ import annotations

from typing import Any

import torch

from treeattn.errors import StateError

NOT_ATTENDED = (
    "keys and values were cached, and 'treeattn' did not attend to them: the model does not go through "
    "transformers' attention interface, has another attn_implementation, or changed the keys on the way"
)

_OTHER_MASK = (
    "something else than 'treeattn' computed with its mask: the model does not go through transformers' "
    "attention interface, or generate() was given a static cache (pass a treeattn.huggingface.ShardedKV)"
)

#: What a model may ask of a sealed tensor, and what may hand it over as it is.
_HARMLESS = {
    "__get__", "__len__", "contiguous", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
    "is_floating_point", "ndimension", "nelement", "numel", "size", "stride", "to", "type",
}  # fmt: skip


class Sealed(torch.Tensor):
    """New keys, of which a model that attends by itself would make another text, or the beginnings that
    `mask` made. Has the tensor in it as `plain`."""

    plain: torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise `StateError` for all that computes."""
        if func.__name__ in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            if result is args[0] or not isinstance(result, torch.Tensor):
                return result
        raise StateError(_OTHER_MASK if any(hasattr(one, "window") for one in args) else NOT_ATTENDED)


def sealed(tensor: torch.Tensor, **attached: Any) -> torch.Tensor:
    """The tensor sealed, with `attached` attributes; in a compiled model, which is traced, open."""
    compiling = torch.compiler.is_compiling()
    one: Any = tensor.view(tensor.shape) if compiling else tensor.as_subclass(Sealed)
    one.plain = tensor
    for name, value in attached.items():
        setattr(one, name, value)
    made: torch.Tensor = one
    return made


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside a sealed one; any other as it is."""
    return tensor.plain if isinstance(tensor, Sealed) else tensor
