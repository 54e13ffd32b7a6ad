"""Names resolve in a bare checkout, and only under the package's own name."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests/unit/test_partial.py"


def python(program: str, cwd: Path = ROOT):
    return subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def copied(request, tmp_path) -> Path:
    """What a clone in a folder of some name holds beside the package, and one file of tests."""
    folder = tmp_path / request.param
    for name in ("treeattn", "collectives", "kernels", "tests/support"):
        shutil.copytree(
            ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path in [*ROOT.glob("*.*"), *ROOT.glob("tests/*.py"), *ROOT.glob("tests/unit/conf*.py"), TESTS]:
        if path.is_file():
            (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / path.relative_to(ROOT))
    return folder


@pytest.mark.parametrize("copied", ["numpy", "a b/treeattn"], indirect=True)
@pytest.mark.slow
def test_tests_are_collected_in_a_folder_of_any_name(copied):
    """`git clone` makes a folder named treeattn, which pytest must not take for the package."""
    file = str(TESTS.relative_to(ROOT))
    words = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", file)
    done = subprocess.run(words, cwd=copied, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{file}::" in done.stdout


@pytest.mark.parametrize("copied", ["links as files"], indirect=True)
def test_kernels_beside_the_package(copied):
    """Where links came out as plain files, the sources in the checkout are what is compiled."""
    for name in ("collectives", "kernels"):
        (copied / "treeattn" / name).unlink()
        (copied / "treeattn" / name).write_text(f"../{name}")
    program = "from treeattn.backends import kernel_folder as at; print(at('cpu'), at('cuda'), sep='\\n')"
    done = python(program, copied)
    assert done.stdout.splitlines() == [f"{copied}/kernels/cpu", f"{copied}/kernels/cuda"], done.stderr
    shutil.rmtree(copied / "kernels")
    done = python(program, copied)
    assert "BackendError: no kernels/cpu in" in done.stderr
    assert "install it again" in done.stderr


@pytest.mark.parametrize("copied", ["links as files"], indirect=True)
def test_make_puts_links_where_files_lie(copied):
    """One of them a file, as git writes it without core.symlinks, and one absent, as in an sdist."""
    for name in ("collectives", "kernels"):
        (copied / "treeattn" / name).unlink()
    (copied / "treeattn/collectives").write_text("../collectives")
    shutil.copy(ROOT / "Makefile", copied)
    subprocess.run(["make", "-s", "links"], cwd=copied, check=True, timeout=300)
    for name in ("collectives", "kernels"):
        assert (copied / "treeattn" / name).resolve() == copied / name


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
    done = python(
        f"import sys, treeattn; print({heavy!r} & set(sys.modules))\n"
        "import treeattn.backends.cpu, treeattn.backends.cuda.cupy_runtime; print('cupy' in sys.modules)"
    )
    assert done.stdout.split() == ["set()", "False"], done.stdout + done.stderr


def test_one_version_of_transformers():
    served = re.search(r'^SERVED = "(.*)"$', (ROOT / "treeattn/huggingface/__init__.py").read_text(), re.M)[1]
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    asked = [extras["options.extras_require"][extra].split() for extra in ("huggingface", "oracle")]
    assert all(f"transformers=={served}.*" in packages for packages in asked)
