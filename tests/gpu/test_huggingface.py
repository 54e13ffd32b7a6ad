"""Models of transformers on a real GPU, on one rank: eager's logits and tokens on the same GPU; and compiled
ones on two ranks."""

import copy
import functools
from pathlib import Path

import pytest

from treeattn.backends.cuda import cupy_runtime

if problem := cupy_runtime.problem():  # before torch, which takes seconds to import
    pytest.skip(problem, allow_module_level=True)
transformers = pytest.importorskip("transformers", reason="not installed (the extra `huggingface`)")
torch = pytest.importorskip("torch", reason="not installed (the extra `huggingface`)")
if not torch.cuda.is_available():
    pytest.skip("this torch has no CUDA", allow_module_level=True)

from tests.gpu import graph_over_ranks  # noqa: E402
from tests.support.sharded_models import check_text, way_of  # noqa: E402
from tests.support.tiny_models import logits_of, padded, prompt, wide  # noqa: E402
from tests.support.torchrun import torchrun  # noqa: E402
from treeattn import huggingface  # noqa: E402
from treeattn.collectives.runtime import nccl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")

FAMILIES = (
    "Llama",
    "Mistral",
    "Qwen3-MoE",
    "Gemma 2",
    "Gemma 3n",
    "GPT-OSS",
    "Phi-3",
    "Cohere2",
    "LFM2",
    "DeepSeek-V3",
)


def on_the_gpu(family, kind):
    return wide(family, dtype=getattr(torch, kind)).to("cuda")


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_family(family, kind):
    if (family, kind) == ("DeepSeek-V3", "float32"):
        pytest.skip("latents on a GPU are of 16 bits")
    model, ids = on_the_gpu(family, kind), prompt(2).to("cuda")
    mask = padded(ids)

    def own(model):
        return logits_of(model, ids, transformers.DynamicCache(config=model.config), mask)[
            mask.bool()
        ].double()

    eager, exact = own(model), own(copy.deepcopy(model).float())
    model.set_attn_implementation("treeattn")
    cache = huggingface.ShardedKV(model.config, capacity=16)
    got = logits_of(model, ids, cache, mask)[mask.bool()].double()
    if kind == "float32":
        assert (got - eager).abs().max() <= 2e-5 * eager.abs().max()
    else:
        ours, its = (torch.linalg.vector_norm(one - exact) for one in (got, eager))
        assert ours <= 1.5 * its


@pytest.mark.parametrize("way", ["greedy", "beams", "prompt lookup"])
def test_a_way_of_generate(way):
    ids, given = way_of("Llama", way, 1)
    cache_of = functools.partial(huggingface.ShardedKV, capacity=16)
    check_text(on_the_gpu("Llama", "float32"), ids.to("cuda"), cache_of, **given)


def test_a_prompt_computed_once(tmp_path):
    model, ids = on_the_gpu("Llama", "float32"), prompt(2).to("cuda")
    given = {"max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(ids, **given).tolist()
    model.set_attn_implementation("treeattn")
    cache, again = (huggingface.ShardedKV(model.config, capacity=16) for _ in range(2))
    huggingface.prefill(model, ids[:, :-1], cache)
    cache.save(tmp_path)
    again.load(tmp_path, device=model.device)
    assert model.generate(ids, cache=again, **given).tolist() == wanted


def test_a_step_is_one_graph():
    torch._dynamo.reset()
    graph_over_ranks.check()


@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_a_step_of_two_ranks_is_one_graph(transport):
    if transport == "nccl" and (problem := nccl.problem()):
        pytest.skip(problem)
    done = torchrun(Path(graph_over_ranks.__file__), transport, ranks=2, timeout=280, TREEATTN_TIMEOUT="60")
    assert done.stdout.count("one graph") == 2
