"""Names resolve in a bare checkout, and only under the package's own name."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(program: str, cwd: Path = ROOT):
    return subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("name", ["treeattn", "other"])
def test_a_program_beside_a_clone(tmp_path, name):
    """Python sees the clone's own folder before the package in it, if the folder has the package's name."""
    (tmp_path / name).symlink_to(ROOT)
    (tmp_path / "program.py").write_text("import treeattn; print(treeattn.decode, treeattn.__file__)")
    environment = {**os.environ, "PYTHONPATH": "" if name == "treeattn" else str(tmp_path / name)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / name / "treeattn/__init__.py") in done.stdout


def test_links_resolve_in_the_checkout():
    for name in ("collectives", "kernels"):
        link = ROOT / "treeattn" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name


def test_checkout_imports_everything():
    done = python("import treeattn, treeattn.collectives.executors.loopback; print(treeattn.schemes())")
    assert done.returncode == 0, done.stderr
    assert "binary_tree" in done.stdout


def test_collectives_has_one_name_only():
    done = python("import collectives")
    assert done.returncode != 0
    assert "imported as treeattn.collectives" in done.stderr


def test_kernels_stays_free_for_others():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_tests_need_the_pytest_whose_warnings_they_name():
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    (needed,) = re.findall(r"^pytest>=(\d+)$", config["options.extras_require"]["test"], re.MULTILINE)
    named = re.findall(r"pytest\.PytestRemovedIn(\d+)Warning", config["tool:pytest"]["filterwarnings"])
    assert all(int(needed) >= int(release) - 1 for release in named)


def test_import_loads_no_heavy_module():
    """Looking at schedules needs no MPI library, and a bare machine with a GPU has no msgspec."""
    heavy = {"mpi4py.MPI", "cupy", "torch", "matplotlib", "msgspec"}
    done = python(f"import sys, treeattn; print({heavy!r} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
