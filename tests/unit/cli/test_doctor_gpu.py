"""The doctor's findings about GPUs on machines that have all, some or none of what one needs."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace

import pytest

from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda import driver as cuda_driver
from treeattn.backends.cuda.driver import Driver, Gpu
from treeattn.cli import doctor_gpu, probe
from treeattn.errors import BackendError
from treeattn.mpi import library

H100 = Gpu("NVIDIA H100 80GB HBM3", "9.0", 80 << 30)
DRIVER = Driver("550.54.15", (12, 4), (H100, H100))


def raiser(error):
    def raises(*_):
        raise error

    return raises


@pytest.fixture
def found(monkeypatch):
    """What is found on a machine with two GPUs and all that they need, but for what is told; "trials": of
    what two ranks were started for."""

    def find(builds=("cupy-cuda12x",), driver=lambda: DRIVER, cuda=12090, hip=False, nvrtc=lambda: (12, 9),
             nccl=True, aware=True, launcher="mpiexec", trial=("rightright", None), modules=()):  # fmt: skip
        runtime = SimpleNamespace(runtimeGetVersion=cuda if callable(cuda) else lambda: cuda, is_hip=hip)
        cupy, trials = ModuleType("cupy"), []
        cupy.cuda = SimpleNamespace(runtime=runtime, nvrtc=SimpleNamespace(getVersion=nvrtc))
        own = SimpleNamespace(available=bool(nccl), get_version=nccl if callable(nccl) else lambda: 22505)
        loaded = {"cupy": cupy, "cupy.cuda": ModuleType("cupy.cuda"), "cupy.cuda.nccl": own, **dict(modules)}
        for name, module in loaded.items():
            monkeypatch.setitem(sys.modules, name, module)
        listed = [
            SimpleNamespace(metadata={"Name": n}, version="14.2.0") for n in (*builds, "numpy", "cupyx")
        ]
        monkeypatch.setattr(importlib.metadata, "distributions", lambda: listed)
        monkeypatch.setattr(cuda_driver, "driver", driver)
        kernel = raiser(BackendError("no NVRTC")) if nvrtc() == (0, 0) else lambda module, _: None
        monkeypatch.setattr(cupy_runtime, "current", lambda: SimpleNamespace(kernel=kernel))
        monkeypatch.setattr(library, "cuda_aware", lambda: aware)
        monkeypatch.setattr(probe, "launcher", lambda: launcher)
        monkeypatch.setattr(probe, "in_two_ranks", lambda _, program: trials.append(program) or trial)
        findings = {finding.subject: finding for finding in doctor_gpu.findings()}
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
        "CuPy": "cupy-cuda12x 14.2.0, built for CUDA 12.9",
        "NVRTC": "version 12.9",
        "NCCL": "version 2.25.5",
        "CUDA kernels": "one was compiled and loaded",
        "Peer memory": "two ranks decoded by it",
        "CUDA-aware MPI": "two ranks decoded by it",
    }
    assert {finding.verdict for finding in findings.values()} == {"ok"}


def test_nothing_is_there(found):
    findings = found(builds=(), driver=lambda: None, aware=False, modules={"cupy": None})
    assert (findings.pop("trials"), "CUDA kernels" in findings) == ([], False)
    assert {finding.verdict for finding in findings.values()} == {"missing"}


NO_GPUS, AGAIN = DRIVER._replace(gpus=()), "pip uninstall cupy-cuda12x and pip install 'treeattn[cuda12]'"
NO_CUPY = ModuleNotFoundError("No module named 'cupy'", name="cupy")


@pytest.mark.parametrize(
    ("changes", "subject", "what", "remedy", "trials"),
    [
        ({"driver": raiser(BackendError("does not start"))}, "NVIDIA driver", "does not start", "reboot", 0),
        ({"driver": lambda: NO_GPUS}, "GPU", "the driver shows none", "CUDA_VISIBLE_DEVICES", 0),
        ({"driver": lambda: NO_GPUS}, "CUDA-aware MPI", "it is; not tried: no usable GPU", "", 0),
        ({"builds": (), "modules": {"cupy": None}}, "CuPy", "not installed", "treeattn[cuda12]", 0),
        (
            {"builds": ("cupy-cuda12x", "cupy-cuda13x")}, "CuPy", "cupy-cuda12x 14.2.0, cupy-cuda13x 14.2.0",
            "pip uninstall cupy-cuda12x cupy-cuda13x and pip install 'treeattn[cuda12]'", 0,
        ),
        (
            {"builds": ("cupy-cuda13x",), "cuda": 13020}, "CuPy", "for CUDA 13.2; the driver serves less",
            "pip install 'treeattn[cuda12]', or update the driver", 0,
        ),
        ({"builds": ("cupy-rocm-7-0",), "hip": True}, "CuPy", "ROCm, which is not served", "", 0),
        ({"cuda": raiser(AttributeError("libfoo: none\nof"))}, "CuPy", "not load: libfoo: none", AGAIN, 0),
        ({"cuda": raiser(NO_CUPY)}, "CuPy", "14.2.0 does not load: No module named 'cupy'", AGAIN, 0),
        ({"nvrtc": lambda: (13, 5)}, "NVRTC", "version 13.5 compiles for newer", "nvrtc-cu12==12.*", 2),
        ({"nccl": False}, "NCCL", "libnccl.so.2 does not load", "treeattn[nccl12]", 2),
        ({"nccl": raiser(RuntimeError("libnccl"))}, "NCCL", "libnccl", "treeattn[nccl12]", 2),
        ({"nvrtc": lambda: (0, 0)}, "CUDA kernels", "no NVRTC", "", 2),
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
    assert probe.in_two_ranks(str(launcher), "print('all', 'well')") == ("allwell", None)
    crash = "import ctypes; print('a', flush=True); ctypes.string_at(0)"
    assert probe.in_two_ranks(str(launcher), crash) == ("a", "exit code -11")
    wrong = "ModuleNotFoundError: No module named 'nothing_at_all'"
    assert probe.in_two_ranks(str(launcher), "import nothing_at_all")[1] == wrong
    assert probe.in_two_ranks(str(tmp_path / "none"), "")[1] is not None
