"""The doctor's findings about GPUs on machines that have all, some or none of what one needs."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda import driver as cuda_driver
from treeattn.cli import doctor
from treeattn.collectives.runtime import nccl as nccl_library
from treeattn.errors import BackendError
from treeattn.mpi import library

DRIVER = "550.54.15, CUDA up to 12.4", ["NVIDIA H100 80GB HBM3, compute capability 9.0, 80 GiB"] * 2


def raiser(error):
    return Mock(side_effect=error)


@pytest.fixture
def found(monkeypatch):
    """What is found on a machine with two GPUs and all that they need, but for what is told; "trials": of
    what two ranks were started for."""

    def find(driver=lambda: DRIVER, cupy=None, nvrtc=None, nccl=None, aware=True, launcher="mpiexec",
             trial=("rightright", None)):  # fmt: skip
        trials = []
        kernel = raiser(BackendError(nvrtc)) if nvrtc else lambda module, _: None
        runtime = SimpleNamespace(kernel=kernel, name="NVIDIA H100 80GB HBM3")
        for module, name, value in (
            (cuda_driver, "inventory", driver), (cupy_runtime, "current", cupy or (lambda: runtime)),
            (nccl_library, "problem", lambda: nccl),
            (nccl_library, "version", lambda: (2, 25)), (library, "cuda_aware", lambda: aware),
            (doctor, "launcher", lambda: launcher),
            (doctor, "in_two_ranks", lambda _, program: trials.append(program) or trial),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, value)
        findings = {finding.subject: finding for finding in doctor._gpus()}
        assert {finding.verdict for finding in findings.values()} <= {"ok", "missing"}
        return findings | {"trials": [transport for transport in ("peer", "cuda-mpi")
                                      for program in trials if repr(transport) in program]}  # fmt: skip

    return find


def test_all_is_there(found):
    findings = found()
    assert findings.pop("trials") == ["peer", "cuda-mpi"]
    assert {subject: finding.what for subject, finding in findings.items()} == {
        "NVIDIA driver": "550.54.15, CUDA up to 12.4",
        "GPU": "2 x NVIDIA H100 80GB HBM3, compute capability 9.0, 80 GiB",
        "CuPy": "serves NVIDIA H100 80GB HBM3",
        "NCCL": "version 2.25",
        "CUDA kernels": "one was compiled and loaded",
        "Peer memory": "two ranks decoded by it",
        "CUDA-aware MPI": "two ranks decoded by it",
    }
    assert {finding.verdict for finding in findings.values()} == {"ok"}


NO_GPUS = DRIVER[0], []


@pytest.mark.parametrize(
    ("changes", "subject", "what", "remedy", "trials"),
    [
        ({"driver": raiser(BackendError("does not start"))}, "NVIDIA driver", "does not start", "reboot", 0),
        ({"driver": raiser(BackendError("none"))}, "NVIDIA driver", "none", "install NVIDIA's driver", 0),
        ({"driver": lambda: NO_GPUS}, "GPU", "the driver shows none", "CUDA_VISIBLE_DEVICES", 0),
        ({"driver": lambda: NO_GPUS}, "CUDA-aware MPI", "it is; not tried: no usable GPU", "", 0),
        ({"cupy": raiser(BackendError("no CuPy: install it"))}, "CuPy", "no CuPy: install it", "", 0),
        ({"cupy": raiser(AttributeError("libfoo: none\nof"))}, "CuPy", "libfoo: none", "", 0),
        ({"nccl": "no NCCL: install it"}, "NCCL", "no NCCL: install it", "", 2),
        ({"nvrtc": "no NVRTC"}, "CUDA kernels", "no NVRTC", "", 2),
        ({"aware": None}, "CUDA-aware MPI", "the library cannot tell", "transport='host'", 1),
        ({"aware": False}, "CUDA-aware MPI", "it is not", "transport='host'", 1),
        ({"trial": ("", "exit code 139")}, "CUDA-aware MPI", "decode by it: exit code 139", "built with", 2),
        ({"trial": ("rightwrong", None)}, "Peer memory", "decode by it: rightwrong", "nvidia-smi topo", 2),
        ({"launcher": None}, "Peer memory", "not tried: no launcher", "", 0),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_its_remedy(found, changes, subject, what, remedy, trials):
    findings = found(**changes)
    assert len(findings["trials"]) == trials
    assert findings[subject].verdict == "missing"
    assert what in findings[subject].what
    assert remedy in findings[subject].remedy


def test_a_job_that_crashes_is_only_told_of(tmp_path):
    """The real probe, in one process: the launcher is pretended, the crash is not."""
    launcher = tmp_path / "mpiexec"
    launcher.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    launcher.chmod(0o755)
    assert doctor.in_two_ranks(str(launcher), "print('all', 'well')") == ("allwell", None)
    crash = "import ctypes; print('a', flush=True); ctypes.string_at(0)"
    assert doctor.in_two_ranks(str(launcher), crash) == ("a", "exit code -11")
    wrong = "ModuleNotFoundError: No module named 'nothing_at_all'"
    assert doctor.in_two_ranks(str(launcher), "import nothing_at_all")[1] == wrong
    assert doctor.in_two_ranks(str(tmp_path / "none"), "")[1] is not None
