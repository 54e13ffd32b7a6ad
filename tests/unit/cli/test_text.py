"""What is printed of tokens that are parts of characters, and what a tokenizer is asked for."""

import pytest
from tokenizers import Tokenizer as Made
from tokenizers import decoders, models, pre_tokenizers

from treeattn.cli.generate import TextStream
from treeattn.llama.tokenizer import Tokenizer


@pytest.fixture
def path(tmp_path):
    """A directory whose tokenizer has a token for every byte, and is set up for a training."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Made(models.BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.enable_truncation(4)
    made.enable_padding(length=64)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_prompt_is_taken_whole_and_alone(path):
    assert len(Tokenizer(path, 256).encode("Hello, world")) == 12


@pytest.mark.parametrize("cut", [0, 1])
def test_a_text_that_ends_within_a_character_is_printed_to_its_end(path, monkeypatch, capsys, cut):
    tokenizer = Tokenizer(path, 256)
    tokens = tokenizer.encode("a \u20ac")
    stream = TextStream(tokenizer.decode)
    for end in range(1, len(tokens) + 1 - cut):
        stream(tokens[:end])
    assert capsys.readouterr().out == ("a " if cut else "a \u20ac")
    stream.end()
    assert capsys.readouterr().out == ("\ufffd\n" if cut else "\n")
