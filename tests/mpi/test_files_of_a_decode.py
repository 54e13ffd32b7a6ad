"""One plain decode is followed in few files: what it runs of ours, imports and caches apart, is counted,
and docs/architecture.md shows each of them."""

import sys
from pathlib import Path

import numpy as np

import treeattn

ROOT = Path(treeattn.__file__).resolve().parents[1]
MOST = 20
PAGE = (ROOT / "docs/architecture.md").read_text()


def ours(path):
    """The file below the top folder, as a reader opens it: a link leads from treeattn/ to collectives/."""
    name = str(Path(path).resolve()).removeprefix(f"{ROOT}/")
    return name.startswith(("treeattn/", "collectives/")) and name


def test_a_decode_runs_few_files(comm):
    q, k, v = (np.ones((1, n, heads, 64), np.float32) for n, heads in ((1, 8), (100, 2), (100, 2)))
    treeattn.decode(q, k, v, comm=comm)

    def files_of_one():
        seen = set()
        sys.setprofile(lambda frame, event, _: event == "call" and seen.add(frame.f_code.co_filename))
        try:
            treeattn.decode(q, k, v, comm=comm)
        finally:
            sys.setprofile(None)
        return sorted(filter(None, map(ours, seen)))

    # On a busy machine a rank may wait so long for another that it looks whether that still runs.
    files = min((files_of_one() for _ in range(10)), key=len)
    assert [name for name in files if name.removeprefix("treeattn/") not in PAGE] == []
    assert 10 < len(files) <= MOST, " ".join(files)
