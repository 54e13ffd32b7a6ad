"""Models of Hugging Face transformers over a cache that is sharded over ranks.

>>> from treeattn import huggingface                                             # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained(DIR, attn_implementation="treeattn")  # doctest: +SKIP
>>> cache = huggingface.ShardedKV(model.config, capacity=131072)                 # doctest: +SKIP
>>> model.generate(ids, past_key_values=cache, max_new_tokens=100)               # doctest: +SKIP

Importing this registers "treeattn" as an attention implementation, with its mask, and lets ``generate()``
over a `ShardedKV` of several ranks go on with the scores of rank 0. It is the one package that imports torch
and transformers (5 or newer, the extra ``huggingface``); nothing else here imports it.
"""

from treeattn.errors import BackendError, MissingPackageError

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers
except ImportError as error:
    raise MissingPackageError(f"treeattn.huggingface: {error}; pip install 'treeattn[huggingface]'") from None

if int(_transformers.__version__.split(".")[0]) < 5:
    raise BackendError(
        f"treeattn.huggingface needs transformers 5 or newer, not {_transformers.__version__}: "
        "pip install 'treeattn[huggingface]'"
    )

from treeattn.huggingface.agreeing_ranks import let_generate_agree
from treeattn.huggingface.attention import register
from treeattn.huggingface.cache import ShardedKV
from treeattn.huggingface.prefill import prefill

register()
let_generate_agree(ShardedKV)

__all__ = ["ShardedKV", "prefill"]
