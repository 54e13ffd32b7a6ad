"""The wheel and the sdist of this commit, as they would be published: what `make release-check` runs."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# Where people, their programs and build machines keep files.
PLACES = re.compile(rb"/(?:home|Users|root|work|builds?)/[\w.-]+/")


def run(*words: object, cwd: Path = ROOT, timeout: float = 300) -> str:
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, capture_output=True, text=True, timeout=timeout,
        stdin=subprocess.DEVNULL, env={**os.environ, "NO_COLOR": "1", "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def version() -> str:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup["metadata"]["version"]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> tuple[Path, Path]:
    """(wheel, sdist) of the commit that is checked out, the wheel built from the sdist."""
    folder = tmp_path_factory.mktemp("release")
    run("git", "archive", "--output", folder / "commit.tar", "HEAD")
    with tarfile.open(folder / "commit.tar") as commit:
        commit.extractall(folder / "commit", filter="data")
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "commit")
    return (
        folder / f"dist/treeattn-{version()}-py3-none-any.whl",
        folder / f"dist/treeattn-{version()}.tar.gz",
    )


@pytest.fixture(scope="module")
def unpacked(artifacts, tmp_path_factory) -> tuple[Path, Path]:
    """Both, as folders."""
    folder = tmp_path_factory.mktemp("unpacked")
    wheel, sdist = artifacts
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
    return folder / "wheel", folder / "sdist" / f"treeattn-{version()}"


def test_nothing_is_left_to_commit():
    assert run("git", "status", "--porcelain") == ""


def test_both_are_named_by_the_version(artifacts):
    assert [path.exists() for path in artifacts] == [True, True]


def test_the_index_would_take_them(artifacts):
    said = run(BIN / "twine", "check", "--strict", *artifacts)
    assert said.count("PASSED") == 2


def test_the_wheel_holds_nothing_odd(artifacts):
    run(BIN / "check-wheel-contents", artifacts[0])


def test_the_sdist_holds_what_git_does():
    run(BIN / "check-manifest", "--no-build-isolation")


def test_the_citation_is_valid():
    assert "valid" in run(BIN / "cffconvert", "--validate")


def test_no_file_names_a_place_of_this_machine(unpacked):
    for folder in unpacked:
        for path in (path for path in folder.rglob("*") if path.is_file()):
            text = path.read_bytes()
            assert not PLACES.search(text), f"{path.relative_to(folder)}: {PLACES.search(text)}"
            assert str(ROOT).encode() not in text, path.relative_to(folder)


def test_the_tests_pass_out_of_the_sdist(unpacked, tmp_path):
    """As whoever packages it runs them: no git, no links, no environment of ours."""
    folder = tmp_path / "treeattn"
    shutil.copytree(unpacked[1], folder)
    said = run("make", "test-quick", cwd=folder, timeout=900)
    assert ", 0 failed, " in said.splitlines()[-1]
