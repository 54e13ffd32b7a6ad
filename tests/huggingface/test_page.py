"""The programs of "Your model over many machines" and of the page on cache nodes, as they stand there."""

import functools
import re
import sys
from pathlib import Path

import pytest
import tokenizers  # which transformers brings
import torch
import transformers

from tests.support.examples import run_examples
from tests.support.tiny_models import made, prompt
from treeattn import cache_nodes, huggingface

DOCS = Path(__file__).parents[2] / "docs"


def program(page, line):
    """The block of a page that has this line."""
    blocks = re.findall(r"^```text\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if line in block)
    return compile(block, page, "exec")


@pytest.fixture
def directory(comm, folder):
    """A saved model with a tokenizer, whose words are numbers."""
    if comm.rank == 0:
        made("Llama").save_pretrained(folder)
        words = tokenizers.models.WordLevel({str(word): word for word in range(97)}, "0")
        tokenizer = tokenizers.Tokenizer(words)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    comm.barrier()
    return folder


def text(tokens):
    ids = prompt()
    got = made("Llama").generate(ids, do_sample=False, max_new_tokens=tokens)[0].tolist()
    return " ".join(map(str, ids[0].tolist())), " ".join(map(str, got))


def test_from_zero_to_a_text(comm, directory, monkeypatch, capsys):
    given, wanted = text(32)
    monkeypatch.setattr(sys, "argv", ["generate.py", directory, given])
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda _: None)  # torchrun's is there
    exec(program("huggingface.md", "communicators.intracomm(None).rank == 0"), {})
    assert capsys.readouterr().out == (f"{wanted}\n" if comm.rank == 0 else "")


#: Of each model of the page what its published configuration says: layers, and numbers of a token in each.
CONFIGURATIONS = {
    "Llama-3.1-8B": (32, 2 * 8 * 128),
    "Qwen3-30B-A3B": (48, 2 * 4 * 128),
    "DeepSeek-V3 (latents)": (61, 512 + 64),
}


def test_the_memory_that_a_gpu_needs():
    rows = re.findall(
        r"^\| (.+) \| [\d,]+ \| ([\d,]+) \| (.+), (.+), (.+) \|$", (DOCS / "huggingface.md").read_text(), re.M
    )
    assert [name for name, *_ in rows] == list(CONFIGURATIONS)
    for name, token, *memory in rows:
        layers, numbers = CONFIGURATIONS[name]
        bytes_of_a_token = 2 * layers * numbers
        assert token == f"{bytes_of_a_token:,}"
        for ranks, said in zip((1, 8, 64), memory, strict=True):
            assert said == f"{bytes_of_a_token * 2**20 / ranks / 1e9:#.{len(said.replace('.', ''))}g}".rstrip(
                "."
            )


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_prompt_computed_once(comm, directory, monkeypatch, compiled):
    """Also by a compiled model, as the page compiles it; here without a compiler."""
    model, ids = made("Llama"), prompt()
    wanted = model.generate(ids, max_new_tokens=100)
    model.set_attn_implementation("treeattn")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    names = {"model": model, "ids": ids, "huggingface": huggingface, "torch": torch}
    names |= {"DIRECTORY": f"{directory}/cache", "cache": huggingface.ShardedKV(model.config, capacity=64)}
    if compiled:
        exec(program("huggingface.md", "torch.compile"), names)
    exec(program("huggingface.md", "cache.save"), names)
    assert names["out"].tolist() == wanted.tolist()


def test_a_model_process(comm, directory):
    if comm.size == 1 or comm.library == "torch":
        pytest.skip("cache nodes are other ranks of mpiexec")
    if comm.rank:
        cache_nodes.serve()
        return
    names = {"DIRECTORY": directory, "ids": prompt()}
    exec(program("cache-nodes.md", "AutoModelForCausalLM"), names)
    names["nodes"].close()
    assert names["out"].tolist() == made("Llama").generate(prompt(), max_new_tokens=100).tolist()


def test_weights_by_heads(comm, directory, group):
    """The last one: torch's group is then the default."""
    if comm.size != 2:
        pytest.skip("the model has two heads of keys")
    names = {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "huggingface": huggingface}
    exec(program("huggingface.md", "tp_plan"), names | {"MODEL": directory}, names)
    greedy = {"do_sample": False, "max_new_tokens": 4}
    got = names["model"].generate(prompt(), past_key_values=names["cache"], **greedy)
    assert got.tolist() == made("Llama").generate(prompt(), **greedy).tolist()


@pytest.mark.parametrize("named", [huggingface.ShardedKV, huggingface.prefill])
def test_the_example_of_a_docstring_shows_what_comes_out(comm, named):
    torch.manual_seed(0)  # equal weights on all ranks
    given = {name: getattr(transformers, name) for name in ("AutoModelForCausalLM", "LlamaConfig")}
    assert run_examples(named, **given, huggingface=huggingface, torch=torch)
