"""Values of options, where results go and what is written on, and what a tokenizer is asked for."""

import sys
from unittest import mock

import click
import pytest
from click.testing import CliRunner

from tests.command.test_generate import byte_tokenizer
from treeattn.cli import roofline as command
from treeattn.cli.generate import TextStream
from treeattn.cli.options import Output, choices, number, numbers, output_options, read
from treeattn.cli.standard_output import StandardOutput
from treeattn.collectives.clusters.arrivals import duration
from treeattn.errors import ArgumentError
from treeattn.llama.tokenizer import Tokenizer
from treeattn.report import Report
from treeattn.study import environment


def test_values_are_read():
    assert number("64Ki") == 65536
    assert numbers("4k,4000,1Mi") == [4000, 1 << 20]
    assert [duration(text) for text in ("0", "100us", "1.5ms", "2s")] == [0.0, 100.0, 1500.0, 2e6]
    assert choices(("a", "b"))("b, a,b") == ("b", "a")


@pytest.mark.parametrize(
    ("reader", "bad"),
    [
        *((numbers, text) for text in ("", "many", "1.5", "0", "-4", "9" * 19, "1,,2", "³")),
        *((duration, text) for text in ("", "5", "fast", "-1ms", "1h", "nanus", "9e99s")),
        *((choices(("a",)), text) for text in ("", "c", "a,c")),
    ],
)
def test_other_values_are_refused(reader, bad):
    with pytest.raises(ArgumentError, match="give|choose from a"):
        reader(bad)


@click.command()
@click.option("--tokens", callback=read(number), default="4k")
@output_options("The drawing.")
def draws(tokens, output):
    output.open()
    made = Report({"tokens": tokens})
    made.line(f"{tokens} tokens")
    output.report(made)
    output.draw("#", "the drawing")


def test_a_command_takes_its_output_as_one_object(tmp_path):
    out, json = tmp_path / "drawing", tmp_path / "facts.json"
    done = CliRunner().invoke(draws, ["--tokens", "2Ki", "--out", str(out), "--json", str(json)])
    assert (done.exit_code, done.output) == (0, f"2048 tokens\nthe drawing is in {out}\n")
    assert (out.read_text(), json.read_text()) == ("#\n", '{\n "tokens": 2048\n}\n')
    assert CliRunner().invoke(draws, []).output == "4000 tokens\n#\n"


def test_an_error_names_the_option():
    done = CliRunner().invoke(draws, ["--tokens", "many"])
    assert done.exit_code == 2
    assert "Invalid value for '--tokens': 'many': give a whole number, such as 65536 or 64Ki" in done.output


def test_no_output_is_an_input_or_another_output(tmp_path):
    paths = tmp_path / "a", tmp_path / "b"
    for output, inputs in ((Output(paths[0], paths[0]), ()), (Output(paths[0]), paths)):
        with pytest.raises(ArgumentError, match="named twice"):
            output.open(*inputs)
    with pytest.raises(ArgumentError, match="not an ordinary file"):
        Output(tmp_path).open()


def test_nothing_is_measured_before_the_software_is_known(monkeypatch):
    """It loads the MPI library, which may end the process: then no measurement is lost."""
    called = mock.Mock()
    called.measure.side_effect = ZeroDivisionError  # instead of results
    monkeypatch.setattr(command.roofline, "measure", called.measure)
    monkeypatch.setattr(environment, "software", called.software)
    with pytest.raises(ZeroDivisionError):
        command.command.main([], standalone_mode=False)
    assert [name for name, *_ in called.mock_calls][:2] == ["software", "measure"]


def test_bytes_are_refused_even_none():
    """By which click tells text from bytes: it would write bytes of all that follows."""
    with pytest.raises(TypeError, match="must be str, not bytes"):
        StandardOutput(sys.stdout).write(b"")


@pytest.fixture
def path(tmp_path):
    """A directory whose tokenizer has a token for every byte, and is set up for a training."""
    made = byte_tokenizer()
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
