"""Clones where people put them: in the folder that `git clone` makes, in a path with a space."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .test_install import run

ROOT = Path(__file__).resolve().parents[2]
CACHE = "tests/data/smollm2_layer17_4096.safetensors"

pytestmark = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="no git, or no repository to clone"
)


@pytest.fixture
def clone(request, tmp_path):
    """Of the last commit, in a folder of some name, with some settings of git."""
    name, *settings = request.param
    subprocess.run(["git", *settings, "clone", "-q", ROOT, tmp_path / name], check=True, timeout=600)
    return tmp_path / name


@pytest.mark.parametrize("clone", [["treeattn"]], indirect=True)
def test_a_clone_of_the_name_of_the_package(clone):
    """With the packages that are installed here, and the sources of the clone."""
    python = (sys.executable, "-m")
    everything = run(*python, "pytest", "--collect-only", "-q", cwd=clone)
    ranks = run(*python, "pytest", "--collect-only", "-q", "tests/mpi", cwd=clone)
    assert "tests/unit/" in everything
    assert "tests/mpi/" in ranks
    run(*python, "pytest", "-q", "tests/unit/test_shards.py", cwd=clone)
    decoded = run(Path(sys.executable).with_name("mpiexec"), "-n", "2", *python, "treeattn", "decode", CACHE,
                  "--repeat", "1", cwd=clone)  # fmt: skip
    assert "pass" in decoded


@pytest.mark.parametrize("clone", [["a b/treeattn", "-c", "core.symlinks=false"]], indirect=True)
def test_make_demo_in_a_path_with_a_space_and_links_as_files(clone):
    """An environment of its own, whose programs name their interpreter in a path with a space."""
    assert (clone / "treeattn/kernels").is_file()
    shown = run("make", "demo", f"PY={sys.executable}", cwd=clone)
    assert shown.count("pass") == 3
    unit = (sys.executable, "-m", "pytest", "-q", "tests/unit/test_shards.py")
    run(*unit, cwd=clone)
    (clone.parent / "program.py").write_text("import treeattn; print(treeattn.__file__)")
    where = run(clone / ".venv/bin/python", "program.py", cwd=clone.parent)
    assert where.strip() == str(clone / "treeattn/__init__.py")
