"""The program of docs/cache.md: a cache for which one rank has no memory, and several have."""

import re
import sys

import pytest

from .launch import ROOT, mpiexec, run

PAGE = (ROOT / "docs/cache.md").read_text()
LIMITED = (
    "import os, sys; os.execvp('sh', ['sh', '-c', 'ulimit -v 1048576; exec \"$@\"', 'sh', *sys.argv[1:]])"
)


@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec")
@pytest.mark.parametrize(("ranks", "code"), [(3, 0), (1, 1)])
def test_a_cache_that_exceeds_the_memory_of_one_rank(ranks, code, tmp_path):
    assert "sh -c 'ulimit -v 1048576; python -m mpi4py program.py'" in PAGE
    program = tmp_path / "program.py"
    program.write_text(re.search(r"```text\n(import numpy.*?)```", PAGE, re.DOTALL)[1])
    done = run("-c", LIMITED, sys.executable, "-m", "mpi4py", program, ranks=ranks, code=None)
    assert (done.returncode == 0) == (code == 0), done.stderr
    if code:
        assert "MemoryError: Unable to allocate" in done.stderr
    else:
        held = re.findall(r"(\d+) of 1024 MiB", done.stdout)  # ranks may print into one line
        assert held == ["341"] * 3


def test_what_the_table_of_the_page_says():
    """GB a rank, and tokens that 8 ranks have room for."""
    rows = re.findall(r"^\| \S.*?\((\d+) layers, (.*?)\) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for layers, what, cells in rows:
        heads, _, width = what.partition(" KV heads of ")
        channels = 2 * int(heads) * int(width) if width else int(heads.removeprefix("latents of "))
        token = 2 * channels * int(layers)
        kib, *gigabytes, tokens = (float(cell.replace(",", "")) for cell in cells.split("|"))
        assert kib == round(token / 1024, 1)
        assert gigabytes == [round(token * 2**20 / ranks / 1e9, 1) for ranks in (1, 8, 64)]
        assert tokens == 8 * 40 * 10**9 // token
