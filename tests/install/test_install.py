"""The package in every kind of installation, away from the checkout: what `make wheel-test` runs."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def sources(folder, into, pattern):
    """Names in a wheel of files of the source tree."""
    found = (path for path in (ROOT / folder).rglob(pattern) if path.is_file())
    return {f"{into}/{path.relative_to(ROOT / folder)}" for path in found}


#: What a wheel must hold, no more and no less.
HELD = {"treeattn/py.typed", "treeattn/study/report.html", *sources("treeattn", "treeattn", "*.py")}
HELD |= sources("kernels", "treeattn/kernels", "*.*")
for ending in "*.py", "*.toml":
    HELD |= sources("collectives", "treeattn/collectives", ending)

JOB = """
import numpy as np, treeattn, treeattn.collectives
from mpi4py import MPI
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
rows = np.arange(size * 8 * 8, dtype=np.float32).reshape(1, size * 8, 1, 8) / 500
mine = rows[:, rank * 8 : rank * 8 + 8]
out, lse = treeattn.decode(np.ones((1, 1, 2, 8), np.float32), mine, mine, comm=MPI.COMM_WORLD)
scores = rows[0, :, 0].sum(1) / 8**0.5
weights = np.exp(scores - scores.max())
assert np.allclose(out[0, 0, 0], weights @ rows[0, :, 0] / weights.sum(), rtol=1e-5), out
from treeattn.backends import kernel_folder
print(treeattn.__file__, kernel_folder("cpu"))
"""


TORCH_JOB = """
import importlib.util
import torch, torch.distributed as dist, transformers
from treeattn import huggingface
dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
ids, greedy = torch.arange(2, 40)[None], dict(do_sample=False, max_new_tokens=8)
wanted = model.generate(ids, **greedy)
model.set_attn_implementation("treeattn")
cache = huggingface.ShardedKV(model.config, capacity=64)
huggingface.prefill(model, ids[:, :-1], cache)
assert model.generate(ids, past_key_values=cache, **greedy).tolist() == wanted.tolist()
assert importlib.util.find_spec("mpi4py") is None
print(huggingface.__file__)
dist.barrier()
dist.destroy_process_group()
"""


def run(*words, cwd, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, capture_output=True, text=True, timeout=1200,
        stdin=subprocess.DEVNULL, env=kept | environment,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from an sdist, as package indexes get it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "-q", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """bin/ of an environment that holds the wheel and an MPI runtime."""
    home = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", home, cwd=home)
    run(home / "bin/python", "-m", "pip", "install", "-q", f"{wheel}[mpich]", cwd=home)
    return home / "bin"


def test_wheel_holds_exactly_the_package(wheel):
    files = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert sorted(files) == sorted(HELD)


def test_sdist_holds_the_tests_and_what_they_need(wheel):
    """All folders but the links, which an sdist cannot hold; a file that git ignores may be in them."""
    (packed,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("benchmarks", "collectives", "docs", "jobs", "kernels", "tests", "treeattn"):
        sources = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
        links = (f"{folder}/collectives/", f"{folder}/kernels/")
        assert {name for name in sources if not name.startswith(links)} <= files
    assert {"jobs/emulated_cluster", "jobs/emulation/remote_shell", "Makefile", "README.md"} <= files


def test_wheel_runs_in_another_folder(installed, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    where = run(installed / "mpiexec", "-n", 3, installed / "python", "-m", "mpi4py", "job.py", cwd=tmp_path)
    assert str(ROOT) not in where
    cache = ROOT / "tests/data/smollm2_layer17_4096"
    table = run(
        installed / "mpiexec", "-n", 2, installed / "treeattn", "decode", f"{cache}.safetensors",
        "--expect", f"{cache}.expected.safetensors", cwd=tmp_path,
    )  # fmt: skip
    assert "pass" in table


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="torch or transformers is not installed (the extra `huggingface`)",
)
def test_ranks_of_torchrun_need_no_mpi(wheel, tmp_path):
    """Neither mpi4py nor a library: all else that is installed here is lent to the environment."""
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    run(tmp_path / "venv/bin/python", "-m", "pip", "install", "-q", wheel, cwd=tmp_path)
    (lent := tmp_path / "lent").mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match("mpi|_*(editable|treeattn)", path.name):
            (lent / path.name).symlink_to(path)
    (tmp_path / "job.py").write_text(TORCH_JOB)
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2
    settings = {"PYTHONPATH": str(lent), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    where = run(tmp_path / "venv/bin/python", *launcher, "job.py", cwd=tmp_path, **settings)
    assert where.count(str(tmp_path)) == 2


@pytest.mark.parametrize("words", [
    f"decode {ROOT}/tests/data/smollm2_layer17_4096.safetensors --repeat 1 --check",
    "schedule hierarchical --ranks 8 --nodes 2 --format svg --out a.svg",
    "schemes",
    "doctor",
    "simulate --cluster dgx-h100 --ranks 8",
    "tune --cluster laptop --ranks 4",
    "paper steps",
    "roofline --tokens 4096 --repeat 1",
    "compare --schemes ring --bytes 1Ki --repetitions 6 --out results.jsonl",
])  # fmt: skip
def test_commands_without_the_extra_for_studies(installed, tmp_path, words):
    """None of scipy, pandas, matplotlib and Jinja2 is installed: what needs none of them runs."""
    done = run(installed / "treeattn", *words.split(), cwd=tmp_path)
    if words.startswith("compare"):
        said = " ".join(done.split())
        assert "medians only: scipy is missing" in said
        assert "pip install '.[study]'" in said
        for command in ("plot results.jsonl", "report results.jsonl --out a.html"):
            failed = subprocess.run([installed / "treeattn", *command.split()], cwd=tmp_path,
                                    capture_output=True, text=True, timeout=300)  # fmt: skip
            assert failed.returncode == 1
            assert failed.stderr.endswith("pip install '.[study]'\n")
            assert "Traceback" not in failed.stderr


def test_every_command_has_help_without_an_extra(installed, tmp_path):
    program = "from treeattn.cli import commands; print(*commands.list_commands(None))"
    names = run(installed / "python", "-c", program, cwd=tmp_path).split()
    assert len(names) > 10
    for name in names:
        assert f"treeattn {name}" in run(installed / "treeattn", name, "--help", cwd=tmp_path)


def test_wheel_beside_a_checkout(installed):
    """In the checkout's root the checkout's own code is imported, complete."""
    program = "import treeattn.collectives, treeattn; print(treeattn.collectives.__file__)"
    assert str(ROOT) in run(installed / "python", "-c", program, cwd=ROOT)


@pytest.fixture(params=["a checkout, as make installs it", "an unpacked sdist, which has no links"])
def editable(request, wheel, tmp_path):
    """The sources and bin/ of an environment in which they are installed editable."""
    sources, settings = ROOT, ["--config-settings", "editable_mode=compat"]
    if "sdist" in request.param:
        with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
            archive.extractall(tmp_path / "unpacked", filter="data")
        (sources,), settings = (tmp_path / "unpacked").iterdir(), []
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    install = tmp_path / "venv/bin/python", "-m", "pip", "install", "-q", *settings
    run(*install, "-e", f"{sources}[mpich]", cwd=tmp_path, PIP_CONFIG_SETTINGS="")
    return sources, tmp_path / "venv/bin"


def test_editable_installation(editable, tmp_path):
    """For a program beside a clone named treeattn, too: its folder alone would be an empty namespace."""
    sources, bin_ = editable
    (tmp_path / "program").mkdir()
    (tmp_path / "program/job.py").write_text(JOB)
    if sources == ROOT:
        (tmp_path / "program/treeattn").symlink_to(ROOT)
    start = bin_ / "mpiexec", "-n", 2, bin_ / "python", "-m", "mpi4py", "job.py"
    assert run(*start, cwd=tmp_path / "program").count(f"{sources}/treeattn/__init__.py") == 2


def test_types_are_visible(installed, tmp_path):
    program = "from importlib.resources import files; print((files('treeattn') / 'py.typed').is_file())"
    assert run(installed / "python", "-c", program, cwd=tmp_path).strip() == "True"
