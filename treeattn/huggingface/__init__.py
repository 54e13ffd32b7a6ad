"""Models of Hugging Face transformers over a cache that is sharded over ranks.

>>> from treeattn import huggingface                                             # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained(DIR, attn_implementation="treeattn")  # doctest: +SKIP
>>> cache = huggingface.ShardedKV(model.config, capacity=131072)                 # doctest: +SKIP
>>> model.generate(ids, cache=cache, max_new_tokens=100)                         # doctest: +SKIP

Importing this registers "treeattn" as an attention implementation, with its mask, and lets ``generate()``
over a `ShardedKV` of several ranks go on with the scores of rank 0. It is the one package that imports torch
and transformers (of the extra ``huggingface``); nothing else here imports it.
"""

from treeattn.errors import MissingPackageError

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers
except ImportError as error:
    raise MissingPackageError(f"treeattn.huggingface: {error}; pip install 'treeattn[huggingface]'") from None

#: The versions of transformers that are served, since caches and masks change from one to the next.
#: setup.cfg asks for the same.
SERVED = "5.24"

if not _transformers.__version__.startswith(f"{SERVED}."):
    raise MissingPackageError(
        f"treeattn.huggingface serves transformers {SERVED}, not {_transformers.__version__}: "
        f"pip install 'transformers=={SERVED}.*'"
    )

from treeattn.huggingface.agreeing_ranks import let_generate_agree  # noqa: E402
from treeattn.huggingface.attention import register  # noqa: E402
from treeattn.huggingface.cache import ShardedKV  # noqa: E402
from treeattn.huggingface.prefill import prefill  # noqa: E402

register()
let_generate_agree(ShardedKV)

__all__ = ["ShardedKV", "prefill"]
