"""``treeattn generate`` as a user runs it, on a tiny model."""

import functools

import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.drawn import sample
from tests.support.models import GOLDEN, PROMPT, write_model
from treeattn.collectives import build

from .launch import in_process, treeattn

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


@pytest.fixture
def generated(model, tmp_path):
    """Facts and what was printed of so many tokens, which are Hugging Face's."""

    def run(*words, ranks, count=16):
        given = ("--prompt-ids", IDS, "-n", count, *words, "--json", tmp_path / "facts.json")
        done = treeattn("generate", "--model", model, *given, ranks=ranks)
        wanted = GOLDEN["grouped_llama3.tokens"].tolist()[:count]
        assert done.facts["tokens"] == wanted
        assert done.stdout == ",".join(map(str, wanted)) + "\n"
        return done.facts, done.stderr

    return run


@pytest.mark.parametrize("decode", sample(2, ["tree", "kv_ring", "query_ring"]))
def test_tokens_are_those_of_hugging_face(generated, decode):
    facts, said = generated("--decode", decode, ranks=3)
    assert len(facts["step_s"]) == 15
    assert "first token after" in said
    per_token = 4 * 2 * 3 * 2 * 16  # float32, k and v, layers, KV heads, head_dim
    assert sum(facts["cache_bytes"]) >= 316 * per_token
    assert max(facts["cache_bytes"]) <= (316 // 3 + 2) * per_token


def test_a_schedule_of_ones_own_reduces(generated, model, tmp_path):
    own = tmp_path / "own.json"
    own.write_text(build("ring", 2).to_json())
    facts, _ = generated("--scheme", own, ranks=2, count=4)
    assert facts["scheme"].startswith("ring@")
    done = treeattn("generate", "--model", model, "--prompt-ids", IDS, "--scheme", own, ranks=3, code=2)
    assert f"{own}: size: the schedule is for 2 ranks, this job has 3: " in done.stderr


@pytest.mark.parametrize("weights", ["sharded", "replicated"])
def test_drafts_and_sharded_weights_give_the_same_tokens(generated, model, weights):
    facts, said = generated("--weights", weights, "--draft", "ngram", ranks=2)
    accepted = facts["accepted"]
    assert facts["scheme"] == {"replicated": "recursive_doubling", "sharded": "head_scatter"}[weights]
    assert len(accepted) + sum(accepted) == 15
    assert f"drafts   {sum(accepted) / len(accepted):.2f} of 7 accepted a step" in said
    whole = sum(4 * t.size for file in model.glob("*.safetensors") for t in load_file(file).values())
    least, most = (1, 1) if weights == "replicated" else (0.5, 0.6)
    assert all(least * whole <= held <= most * whole for held in facts["weight_bytes"])
    assert all(peak > held for peak, held in zip(facts["peak_bytes"], facts["weight_bytes"], strict=True))


def test_text_goes_in_and_comes_out(model, tmp_path):
    byte_tokenizer().save(str(model / "tokenizer.json"))
    words = ("--model", model, "--prompt", "Grüße, world", "-n", 8)
    done = treeattn("generate", *words, "--json", tmp_path / "facts.json", ranks=2)
    assert done.facts["cache_dtype"] == "float32"
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
    words = ("generate", "--model", path, "--prompt-ids", "1,2,3,4,5,6,7,8", "--draft", "ngram", "-n")
    treeattn(*words, 1, ranks=2)
    done = treeattn(*words, 2, ranks=2, code=2)
    assert "8 tokens of prompt, room for 9: the model was made for at most 8" in done.stderr


LAST = "model-00002-of-00002.safetensors"
REPLICATED, SHARDED = "replicated", "sharded"


@pytest.mark.parametrize(
    ("weights", "broken", "message"),
    [
        (REPLICATED, lambda path: (path / "config.json").unlink(), "config.json: cannot be read (No such"),
        (SHARDED, lambda path: (path / LAST).unlink(), f"{LAST}: no such file"),
        (SHARDED, lambda path: (path / LAST).write_bytes(b"12345678"), f"{LAST}: not a readable safetensors"),
        (REPLICATED, lambda path: byte_tokenizer(300).save(str(path / "tokenizer.json")), "has 300 tokens,"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_used_is_named_on_all_ranks(tmp_path, broken, message, weights):
    """Of its files; tests/unit/llama has what may be wrong in them. The prompt is text."""
    path = write_model(tmp_path, "grouped_llama3")
    byte_tokenizer().save(str(path / "tokenizer.json"))
    broken(path)
    words = ("generate", "--model", path, "--prompt", "Hello, world", "--weights", weights)
    start = in_process if weights == REPLICATED else functools.partial(treeattn, ranks=2)
    done = start(*words, code=2)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout.strip()
