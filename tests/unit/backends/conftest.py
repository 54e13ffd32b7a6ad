"""Every build of the CPU's kernels that this machine can run."""

import pytest

from treeattn.backends import cpu
from treeattn.backends.cpu import attention, compile
from treeattn.errors import BackendError

# The gate takes the fastest instruction set, a deep run the others too.
ISAS = [
    pytest.param(isa, marks=[pytest.mark.deep] if number else [])
    for number, isa in enumerate(compile.available_isas())
]
BUILDS = [
    pytest.param((*isa.values, way), id=f"{isa.values[0]}-{way}", marks=isa.marks)
    for isa in ISAS
    for way in cpu.WAYS[:2]  # the third differs in what is asked for ahead
]


@pytest.fixture(params=[*BUILDS, "numpy"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every instruction set, reading one stream and four in turn, and NumPy without a compiler."""
    if request.param == "numpy":
        monkeypatch.setattr(compile, "loaded", lambda: (None, "not wanted"))
        return "numpy"
    isa, way = request.param
    monkeypatch.setattr(attention, "fastest_way", lambda: way)
    take(isa, monkeypatch)
    return f"{isa}-{way}"


def take(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels be of this build, or skip the test with the reason."""
    try:
        compile.library(isa)
    except BackendError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TREEATTN_ISA", isa)
