"""A shell completes commands, options and their choices."""

from __future__ import annotations

import pytest

from .launch import treeattn


def test_the_shell_is_given_a_script():
    done = treeattn(_TREEATTN_COMPLETE="bash_source")
    assert (done.returncode, done.stderr) == (0, "")
    assert "_TREEATTN_COMPLETE=bash_complete" in done.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("sch", ["schedule", "schemes"]),
        ("schedule --form", ["--format"]),
        ("schedule --format h", ["html"]),
    ],
)
def test_words_are_completed(words, found):
    asked = {"COMP_WORDS": f"treeattn {words}", "COMP_CWORD": str(len(words.split()))}
    done = treeattn(_TREEATTN_COMPLETE="bash_complete", **asked)
    assert [line.partition(",")[2] for line in done.stdout.splitlines()] == found
