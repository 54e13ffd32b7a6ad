"""The signatures that fakes of CuPy keep to are those of the CuPy that is installed; no GPU is needed."""

import functools
import importlib
import importlib.util
import inspect
import re
from typing import Any

import pytest
from cupy_signatures import ATTRIBUTES, SIGNATURES, strict

needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")


def names(parameters: str) -> list[str]:
    """Of "str code=None, *, tuple options=()" the names: code, options."""
    parts = re.sub(r"\([^()]*\)", "", parameters).split(",")
    words = [part.split("=")[0].split(":")[0].split() for part in parts]
    return [word[-1] for word in words if word and word[-1] not in ("*", "\\*", "/", "self")]


def declared(thing: Any) -> list[str] | None:
    """Parameters as CuPy declares them; None where it does not say."""
    first = (thing.__doc__ or "").split("\n")[0]
    if "(" in first:
        return names(first[first.index("(") + 1 : first.rindex(")")])
    try:
        return [name for name in inspect.signature(thing).parameters if name != "self"]
    except (TypeError, ValueError):
        return None


@needs_cupy
@pytest.mark.parametrize("name", SIGNATURES)
def test_what_is_called_is_there(name: str) -> None:
    cupy: Any = importlib.import_module("cupy")
    if name.startswith("cuda.nccl") and not importlib.import_module("cupy.cuda.nccl").available:
        pytest.skip("NCCL is not installed")
    thing = functools.reduce(getattr, name.split("."), cupy)
    parameters = SIGNATURES[name]
    if parameters is not None:
        assert declared(thing) == names(parameters)


@needs_cupy
def test_attributes_of_a_device() -> None:
    runtime = importlib.import_module("cupy").cuda.runtime
    assert [name for name in ATTRIBUTES if not hasattr(runtime, f"cudaDevAttr{name}")] == []


def test_a_fake_refuses_what_cupy_would() -> None:
    send = strict("cuda.nccl.NcclCommunicator.send", lambda *given: given)
    assert send(1, 2, 3, 4, stream=5) == (1, 2, 3, 4, 5)
    for bad in ((1, 2, 3, 4), (1, 2, 3, 4, 5, 6)):
        with pytest.raises(TypeError):
            send(*bad)
