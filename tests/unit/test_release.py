"""The version and the dependencies stand in setup.cfg, and whatever else names them agrees."""

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
VERSION = SETUP["metadata"]["version"]


def read(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_changelog_begins_with_the_version():
    found = re.search(r"^## (\S+) - (unreleased|\d{4}-\d\d-\d\d)$", read("CHANGELOG.md"), re.MULTILINE)
    assert found is not None
    assert found[1] == VERSION


def test_the_citation_is_of_the_version_and_its_day():
    citation = read("CITATION.cff")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [VERSION]
    days = re.findall(r"^date-released: (.*)$", citation, re.MULTILINE)
    heading = re.search(rf"^## {re.escape(VERSION)} - (.*)$", read("CHANGELOG.md"), re.MULTILINE)
    assert heading is not None
    assert days == ([] if heading[1] == "unreleased" else [heading[1]])


def test_no_source_names_the_version():
    sources = [ROOT / "docs/conf.py", ROOT / "pyproject.toml", ROOT / "Makefile"]
    for folder in ("treeattn", "collectives", "kernels", "jobs"):
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".c", ".cu", ".sh")]
    assert len(sources) > 150
    for path in sources:
        assert VERSION not in path.read_text(), f"{path.relative_to(ROOT)} names {VERSION}"


def needs(text: str) -> dict[str, str]:
    """name -> least version, of lines like `numpy>=1.26`, `numpy >=1.26` or `py-numpy@1.26:`, but Python."""
    found = re.findall(r"(?:^|[\s\"])(?:py-)?([a-z][\w-]+)(?: ?>=|@)([\d.]+)", text)
    return {name.replace("-", "_"): least for name, least in found if name != "python"}


#: Packages of a site have ranks of mpiexec.
NEEDED = SETUP["options"]["install_requires"] + "\n" + SETUP["options.extras_require"]["mpi"]
REQUIRED = needs(NEEDED)
PYTHON = SETUP["options"]["python_requires"].removeprefix(">=")
SPACK = "packaging/spack/spack_repo/treeattn/packages/py_treeattn/package.py"


def test_dependencies_are_read():
    assert REQUIRED["numpy"] == "1.26"
    assert len(REQUIRED) == len(NEEDED.split("\n")) - 1


def test_the_conda_recipe():
    recipe = read("packaging/conda/recipe.yaml")
    assert f'version: "{VERSION}"' in recipe
    assert f'python_min: "{PYTHON}"' in recipe
    run = re.search(r"^  run:\n((?:    .*\n)+)", recipe, re.MULTILINE)
    assert run is not None
    assert needs(run[1]) == REQUIRED
    (script,) = SETUP["options.entry_points"]["console_scripts"].split("\n")[1:]
    assert f"- {script}" in recipe


def test_the_spack_recipe():
    recipe = read(SPACK)
    assert re.findall(r'version\("(.*?)", url=.*-(.*?)\.tar\.gz"', recipe) == [(VERSION, VERSION)]
    run = recipe.partition('type=("build", "run")')[2]
    assert f'"python@{PYTHON}:"' in run
    assert needs(run) == REQUIRED


def test_recipes_build_with_the_setuptools_that_the_package_asks_for():
    asked = needs(read("pyproject.toml"))["setuptools"]
    assert f'"py-setuptools@{asked}:"' in read(SPACK)
    assert f"setuptools >={asked}" in read("packaging/conda/recipe.yaml")


def test_the_apptainer_definition():
    definition = read("packaging/apptainer/treeattn.def")
    assert re.findall(r"^    version=(.*)$", definition, re.MULTILINE) == [VERSION]
    (mpi,) = re.findall(r"^    mpi=(.*)$", definition, re.MULTILINE)
    assert mpi in SETUP["options.extras_require"]
    base = re.search(r"^From: python:3\.(\d+)-", definition, re.MULTILINE)
    assert base is not None
    assert int(base[1]) >= int(PYTHON.partition(".")[2])
