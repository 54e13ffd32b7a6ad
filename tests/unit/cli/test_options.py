"""Values of options, groups of options, and where results go."""

import click
import pytest
from click.testing import CliRunner

from treeattn.cli.options import Output, choices, number, numbers, output_options, read
from treeattn.collectives.clusters.arrivals import duration
from treeattn.errors import ArgumentError
from treeattn.report import Report


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
