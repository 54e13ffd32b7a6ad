"""Bad input is refused in one line that says what is wrong."""

from contextlib import contextmanager

import pytest

from treeattn.errors import ArgumentError


@contextmanager
def refused(*words, error=ArgumentError):
    """What is done within raises the error, all words in its one line."""
    with pytest.raises(error) as raised:
        yield
    said = str(raised.value)
    assert [word for word in words if word not in said] == [], said
    assert "\n" not in said
