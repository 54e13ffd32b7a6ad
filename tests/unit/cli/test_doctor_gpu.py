"""The doctor's findings about GPUs on machines that have all, some or none of what one needs."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda import driver as cuda_driver
from treeattn.backends.cuda.driver import Driver, Gpu
from treeattn.cli import doctor_gpu, probe
from treeattn.cli.probe import Finding
from treeattn.errors import BackendError
from treeattn.mpi import library

H100 = Gpu("NVIDIA H100 80GB HBM3", "9.0", 80 << 30)


class DynamicLibNotFoundError(RuntimeError):
    """As in cuda.pathfinder."""


def raiser(error: Exception) -> Callable[..., Any]:
    def raises(*_: object, **__: object) -> Any:
        raise error

    return raises


class Machine:
    """A machine with two GPUs and all that they need; its parts can be changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.builds = {"cupy-cuda12x": "14.2.0", "numpy": "2.4.0", "cupyx-like": "1"}
        monkeypatch.setattr(importlib.metadata, "distributions", self._distributions)
        self.driver = Driver("550.54.15", (12, 4), (H100, H100))
        monkeypatch.setattr(cuda_driver, "driver", lambda: self.driver)
        self.runtime = SimpleNamespace(runtimeGetVersion=lambda: 12090, is_hip=False)
        self.nvrtc = SimpleNamespace(getVersion=lambda: (12, 9))
        self.nccl = SimpleNamespace(available=True, get_version=lambda: 22505)
        self.cupy = ModuleType("cupy")
        self.cupy.cuda = SimpleNamespace(runtime=self.runtime, nvrtc=self.nvrtc)  # type: ignore[attr-defined]
        for name, module in {
            "cupy": self.cupy,
            "cupy.cuda": ModuleType("cupy.cuda"),
            "cupy.cuda.nccl": self.nccl,
        }.items():
            monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
        self.compiled: list[str] = []
        device = SimpleNamespace(kernel=lambda module, expression: self.compiled.append(module))
        monkeypatch.setattr(cupy_runtime, "current", lambda: device)
        self.aware: bool | None = True
        monkeypatch.setattr(library, "cuda_aware", lambda: self.aware)
        monkeypatch.setattr(probe, "launcher", lambda: "mpiexec")
        self.trial: tuple[str, str | None] = ("rightright", None)
        self.trials = 0
        monkeypatch.setattr(probe, "in_two_ranks", self._in_two_ranks)

    def _distributions(self) -> list[Any]:
        return [SimpleNamespace(metadata={"Name": n}, version=v) for n, v in self.builds.items()]

    def _in_two_ranks(self, launcher: str, program: str) -> tuple[str, str | None]:
        compile(program, "trial", "exec")
        self.trials += 1
        return self.trial

    def findings(self) -> dict[str, Finding]:
        found = {finding.subject: finding for finding in doctor_gpu.findings()}
        assert {finding.verdict for finding in found.values()} <= {"ok", "missing"}
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_all_is_there(machine: Machine) -> None:
    found = machine.findings()
    assert {subject: finding.what for subject, finding in found.items()} == {
        "NVIDIA driver": "550.54.15, CUDA up to 12.4",
        "GPU": "2 x NVIDIA H100 80GB HBM3, compute capability 9.0, 80 GiB",
        "CuPy": "cupy-cuda12x 14.2.0, built for CUDA 12.9",
        "NVRTC": "version 12.9",
        "NCCL": "version 2.25.5",
        "CUDA kernels": "one was compiled and loaded",
        "Peer memory": "two ranks reduced in each other's GPU memory",
        "CUDA-aware MPI": "two ranks exchanged device memory",
    }
    assert {finding.verdict for finding in found.values()} == {"ok"}
    assert machine.compiled == ["finish"]


def test_nothing_is_there(machine: Machine) -> None:
    machine.driver, machine.builds, machine.aware = None, {}, False  # type: ignore[assignment]
    machine.patch.setitem(sys.modules, "cupy", None)
    found = machine.findings()
    assert {finding.verdict for finding in found.values()} == {"missing"}
    assert found["CuPy"].what == "not installed"
    assert "treeattn[cuda12]" in found["CuPy"].remedy
    assert "CUDA kernels" not in found
    assert machine.trials == 0


def test_a_driver_that_does_not_start(machine: Machine) -> None:
    machine.patch.setattr(cuda_driver, "driver", raiser(BackendError("the NVIDIA driver does not start: X")))
    found = machine.findings()
    assert (found["NVIDIA driver"].verdict, found["NVIDIA driver"].what) == (
        "missing",
        "the NVIDIA driver does not start: X",
    )
    assert "reboot" in found["NVIDIA driver"].remedy
    assert found["CuPy"].verdict == "ok"


def test_a_driver_without_gpus(machine: Machine) -> None:
    machine.driver = machine.driver._replace(gpus=())
    found = machine.findings()
    assert "CUDA_VISIBLE_DEVICES" in found["GPU"].remedy
    assert found["CUDA-aware MPI"] == Finding(
        "CUDA-aware MPI", "missing", "the library says that it is; not tried: no usable GPU"
    )
    assert machine.trials == 0


def test_two_builds_of_cupy(machine: Machine) -> None:
    machine.builds["cupy-cuda13x"] = "14.1.0"
    found = machine.findings()
    assert "cupy-cuda12x 14.2.0, cupy-cuda13x 14.1.0" in found["CuPy"].what
    assert (
        found["CuPy"].remedy == "pip uninstall cupy-cuda12x cupy-cuda13x and pip install 'treeattn[cuda12]'"
    )
    assert found["NVRTC"].verdict == found["NCCL"].verdict == "missing"


def test_cupy_for_another_cuda(machine: Machine) -> None:
    machine.builds = {"cupy-cuda13x": "14.2.0"}
    machine.runtime.runtimeGetVersion = lambda: 13020
    found = machine.findings()["CuPy"]
    assert found.what == "cupy-cuda13x 14.2.0, built for CUDA 13.2; the driver serves less"
    assert (
        found.remedy == "pip uninstall cupy-cuda13x and pip install 'treeattn[cuda12]', or update the driver"
    )


def test_cupy_for_amd(machine: Machine) -> None:
    machine.builds = {"cupy-rocm-7-0": "14.2.0"}
    machine.driver, machine.runtime.is_hip = None, True
    machine.runtime.runtimeGetVersion = lambda: 70051831
    found = machine.findings()
    assert found["CuPy"].verdict == found["NVRTC"].verdict == found["NCCL"].verdict == "missing"
    assert found["CuPy"].what == "cupy-rocm-7-0 14.2.0, built for AMD's ROCm, which is not served"


@pytest.mark.parametrize(
    "error", [ImportError("libfoo.so: no such file\nmore"), AttributeError("libfoo.so: no such file")]
)
def test_cupy_that_does_not_load(machine: Machine, error: Exception) -> None:
    machine.runtime.runtimeGetVersion = raiser(error)
    found = machine.findings()
    assert found["CuPy"].what == "cupy-cuda12x 14.2.0 does not load: libfoo.so: no such file"
    assert found["CuPy"].remedy.startswith("pip uninstall cupy-cuda12x and pip install")


def test_what_uninstalling_one_of_two_builds_leaves(machine: Machine) -> None:
    """The other is still listed, but its files are gone."""
    machine.patch.setitem(sys.modules, "cupy", None)
    machine.patch.setattr(
        doctor_gpu, "_imported", raiser(ModuleNotFoundError("No module named 'cupy'", name="cupy"))
    )
    found = machine.findings()["CuPy"]
    assert found.what == "cupy-cuda12x 14.2.0 does not load: No module named 'cupy'"
    assert found.remedy == "pip uninstall cupy-cuda12x and pip install 'treeattn[cuda12]'"


def test_no_nvrtc(machine: Machine) -> None:
    machine.nvrtc.getVersion = raiser(
        DynamicLibNotFoundError('Failure finding "libnvrtc.so.12": No such file')
    )
    machine.patch.setattr(cupy_runtime, "current", raiser(BackendError("no NVRTC to compile with")))
    found = machine.findings()
    assert found["NVRTC"] == Finding(
        "NVRTC",
        "missing",
        'does not load: Failure finding "libnvrtc.so.12": No such file',
        "pip install 'nvidia-cuda-nvrtc-cu12==12.*'",
    )
    assert found["CUDA kernels"].what == "no NVRTC to compile with"


def test_nvrtc_newer_than_the_driver(machine: Machine) -> None:
    machine.nvrtc.getVersion = lambda: (13, 5)
    assert machine.findings()["NVRTC"].what == "version 13.5 compiles for newer drivers than this one"


@pytest.mark.parametrize("change", [{"available": False}, {"get_version": raiser(RuntimeError("libnccl"))}])
def test_no_nccl(machine: Machine, change: dict[str, Any]) -> None:
    vars(machine.nccl).update(change)
    found = machine.findings()["NCCL"]
    assert found.verdict == "missing"
    assert found.remedy == "for transport='nccl': pip install 'treeattn[nccl12]'"


@pytest.mark.parametrize(("answer", "what"), [(None, "the library cannot tell"), (False, "it is not")])
def test_mpi_without_device_pointers(machine: Machine, answer: bool | None, what: str) -> None:
    machine.aware = answer
    found = machine.findings()["CUDA-aware MPI"]
    assert (found.verdict, found.what, machine.trials) == ("missing", what, 1)  # that of peer memory
    assert "transport='host'" in found.remedy


@pytest.mark.parametrize("trial", [("", "exit code 139"), ("rightwrong", None)])
def test_a_wrong_claim_of_the_mpi_library(machine: Machine, trial: tuple[str, str | None]) -> None:
    machine.trial = trial
    found = machine.findings()["CUDA-aware MPI"]
    assert found.verdict == "missing"
    assert found.what == f"the library says that it is, a trial fails: {trial[1] or trial[0]}"


def test_a_job_that_crashes_is_only_told_of(tmp_path: Any) -> None:
    """The real probe, in one process: the launcher is pretended, the crash is not."""
    launcher = tmp_path / "mpiexec"
    launcher.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    launcher.chmod(0o755)
    assert probe.in_two_ranks(str(launcher), "print('all', 'well')") == ("allwell", None)
    crash = "import ctypes; print('a', flush=True); ctypes.string_at(0)"
    printed, problem = probe.in_two_ranks(str(launcher), crash)
    assert (printed, problem) == ("a", "exit code -11")
    assert probe.in_two_ranks(str(launcher), "import nothing_at_all")[1] == (
        "ModuleNotFoundError: No module named 'nothing_at_all'"
    )
    assert probe.in_two_ranks(str(tmp_path / "none"), "")[1] is not None


@pytest.mark.parametrize(
    "trial", [("", "TransportError: cudaErrorPeerAccessUnsupported"), ("rightwrong", None)]
)
def test_gpus_that_cannot_read_each_other(machine: Machine, trial: tuple[str, str | None]) -> None:
    machine.trial = trial
    found = machine.findings()["Peer memory"]
    assert found.verdict == "missing"
    assert found.what == f"two ranks cannot reduce in each other's: {trial[1] or trial[0]}"
    assert "transport='peer'" in found.remedy


def test_peer_memory_is_not_tried_without_a_launcher(machine: Machine) -> None:
    machine.patch.setattr(probe, "launcher", lambda: None)
    assert machine.findings()["Peer memory"].what == "not tried: no launcher"
    assert machine.trials == 0
