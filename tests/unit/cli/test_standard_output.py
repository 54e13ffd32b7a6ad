"""What commands write on."""

import sys

import pytest

from treeattn.cli.standard_output import StandardOutput


def test_bytes_are_refused_even_none():
    """By which click tells text from bytes: it would write bytes of all that follows."""
    with pytest.raises(TypeError, match="must be str, not bytes"):
        StandardOutput(sys.stdout).write(b"")
