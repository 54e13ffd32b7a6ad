"""Every build of the processor's kernels."""

from __future__ import annotations

import pytest

from treeattn.backends import cpu
from treeattn.backends.cpu import compile, kernels
from treeattn.errors import BackendError

BUILDS = [f"{isa}-{order}" for isa in compile.ISA_FLAGS for order in cpu.ORDERS]


@pytest.fixture(params=[*BUILDS, "numpy"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every build that this processor can run, in both orders of reading, and NumPy without a compiler."""
    name, _, order = request.param.partition("-")
    monkeypatch.setenv("TREEATTN_READ_ORDER", order)
    if name == "numpy":
        monkeypatch.setattr(kernels, "loaded", lambda: (None, "not wanted"))
        return name
    take(name, monkeypatch)
    return name


@pytest.fixture(params=compile.ISA_FLAGS)
def each_isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every build that this processor can run."""
    name: str = request.param
    take(name, monkeypatch)
    return name


def take(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels be of this build, or skip the test with the reason."""
    if isa not in compile.available_isas():
        pytest.skip(f"this processor has no {isa}")
    try:
        compile.library(isa)
    except BackendError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TREEATTN_ISA", isa)
