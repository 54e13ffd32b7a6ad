"""The script for a first day on a GPU: what it says without one, its steps over stand-ins for the tools."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gpu_day import needs, readers
from gpu_day.attend import LARGE

from tests.support.drawn import sample
from treeattn.backends.cuda import cupy_runtime

from .launch import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu_day.sh"
STEPS = subprocess.run([SCRIPT, "--list"], capture_output=True, text=True, check=True).stdout.split()

# Every Python that the script starts finds a GPU; nothing of it is used by these steps.
GPU = """
from treeattn.backends.cuda import cupy_runtime
cupy_runtime.problem = lambda: None
"""
# A tool that writes what lies in the file beside it to the file that --log-file names.
TOOL = """#!/usr/bin/env bash
while [ "$1" != --log-file ]; do shift; done
cat "$0.out" > "$2"
exit "$(cat "$0.code")"
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
NO_HAZARD = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
HAZARD = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at partial_attention+0x1a10 in partial_attention.cu:160
=========     and Read access at partial_attention+0x2b40 in attention.cuh:140 [512 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
OUT_OF_BOUNDS = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at partial_attention+0x580 in ptx.cuh:166
=========     by thread (31,0,0) in block (2,0,0)
========= ERROR SUMMARY: 2 errors
"""
UNUSED = """\
========= COMPUTE-SANITIZER
========= Target application terminated before first instrumented API call
"""


def ncu_table(**changed: str) -> str:
    """As with --csv --page raw --print-units base: names, units, a line for each launch."""
    columns = {
        "ID": ("", "0"), "Process ID": ("", "712"), "Process Name": ("", "python3.12"),
        "Host Name": ("", "127.0.0.1"), "Kernel Name": ("", "void partial_attention<bfloat16, 128, 1>(Args)"),
        "Context": ("", "1"), "Stream": ("", "7"), "Block Size": ("", "(128, 1, 1)"),
        "Grid Size": ("", "(32, 16, 1)"), "Device": ("", "0"), "CC": ("", "9.0"),
        "dram__bytes_read.sum.per_second": ("byte/s", "2,801,322,114,000"),
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "83.41"),
        "gpu__time_duration.sum": ("ns", "195,424"),
        "launch__registers_per_thread": ("register/thread", "86"),
        "launch__waves_per_multiprocessor": ("", "0.97"),
        "sm__maximum_warps_per_active_cycle_pct": ("%", "31.25"),
        "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "30.08"),
        "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", "0.12"),
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "9.71"),
        "smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio": ("inst", "0.7"),
    }  # fmt: skip
    for name, unit in changed.items():
        columns[name] = (unit, columns[name][1])
    lines = [
        columns,
        (unit for unit, _ in columns.values()),
        *[[v for _, v in columns.values()]] * len(LARGE),
    ]
    quoted = [",".join(f'"{cell}"' for cell in line) for line in lines]
    return "\n".join(["==PROF== Connected to process 712 (/usr/bin/python3.12)", *quoted, ""])


@pytest.fixture
def day(tmp_path: Path) -> Any:
    """The script, its results under tmp_path/results; `standins`: with a GPU and these tools' output."""

    def run(*steps: str, standins: dict[str, str] | None = None, **environment: str) -> Any:
        variables = {
            **os.environ,
            "PYTHON": sys.executable,
            "RESULTS": str(tmp_path / "results"),
        } | environment
        (tmp_path / "results").mkdir(exist_ok=True)
        if standins is not None:
            tools = tmp_path / "tools"
            tools.mkdir(exist_ok=True)
            (tools / "sitecustomize.py").write_text(GPU)
            for name, text in standins.items():
                (tools / f"{name}.out").write_text(text)
                (tools / f"{name}.code").write_text(environment.get("CODE", "0"))
                (tools / name).write_text(environment.get("TOOL", TOOL))
                (tools / name).chmod(0o755)
            variables |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(tools)}
        done = subprocess.run(
            [SCRIPT, *steps], env=variables, capture_output=True, text=True, timeout=300, cwd=tmp_path
        )
        logs = re.search(r"what the steps printed is in (\S+)", done.stderr)
        if logs:
            subprocess.run(["rm", "-r", logs[1]], check=True)
        assert done.stdout == ""
        return done

    return run


def written(tmp_path: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in (tmp_path / "results").iterdir()}


@pytest.mark.skipif(cupy_runtime.problem() is None, reason="there is a GPU: the steps would run")
def test_without_a_gpu_every_step_says_so_and_nothing_is_written(day: Any, tmp_path: Path) -> None:
    done = day()
    assert done.returncode == 1
    *lines, last = done.stderr.splitlines()
    assert lines == [f"gpu_day: {step}: no GPU: {cupy_runtime.problem()}" for step in STEPS]
    assert last == f"gpu_day: failed: {' '.join(STEPS)}"
    assert not written(tmp_path)


@pytest.mark.deep
def test_a_bare_machine_collects_the_tests_of_gpus(tmp_path: Path) -> None:
    """Importing msgspec or mpi4py.MPI raises ImportError here: what needs them skips, the rest is there."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['msgspec'] = sys.modules['mpi4py.MPI'] = None\n"
    )
    where = f"{tmp_path}:{ROOT}:{ROOT / 'benchmarks'}:{ROOT / 'tests'}"
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider", "--rootdir", ROOT]
    done = subprocess.run(
        [*command, "-q", "--collect-only", "-p", "no:warnings", ROOT / "tests" / "gpu"],
        env=os.environ | {"PYTHONPATH": where, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, cwd=ROOT,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    files = set(re.findall(r"gpu/(test_\w+)\.py::", done.stdout))
    assert files == {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")} - {"test_model"}


def test_what_is_missing_is_named_at_once(day: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module that a step imports is looked for: those of this environment are here."""
    monkeypatch.setattr(needs, "PROGRAMS", {"no-such-program": "ncu"})
    monkeypatch.setattr(needs, "MODULES", {"numpy": "every step", "no_such_module": "tests"})
    said = needs.missing()
    assert said[:2] == ["module no_such_module: tests", "program no-such-program: ncu"]
    assert all(re.fullmatch(r".+: .*(steps?|ranks|compare).*\(.+\)", line) for line in said[2:])


def test_what_some_steps_alone_need_is_not_needed_by_all() -> None:
    """Each step records its result, and those that only measure kernels are in no list."""
    absent = [name for name, steps in needs.MODULES.items() if steps != "every step"]
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); import gpu_day.record"
    program += ", gpu_kernel, gpu_shapes, gpu_splits"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=300)


def test_the_steps_that_need_something_are_steps() -> None:
    for steps in {*needs.MODULES.values(), *needs.PROGRAMS.values()} - {"every step"}:
        assert {step.partition(" (")[0] for step in steps.split(", ")} <= set(STEPS)


@pytest.mark.deep
def test_wheels_are_unpacked_and_results_go_to_one_file(day: Any, tmp_path: Path) -> None:
    """A wheel of MPI has programs and libraries beside modules, and the zip file lost their modes."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tools-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tools-1.data/data/bin/ncu", TOOL.replace('"$0.', '"${0%/*}/../lib/ncu.'))
        wheel.writestr("tools-1.data/data/lib/ncu.out", ncu_table())
        wheel.writestr("tools-1.data/data/lib/ncu.code", "0")
    archive = tmp_path / "all.tar.gz"
    done = day("ncu", standins={}, WHEELS=str(wheels), ARCHIVE=str(archive))
    assert done.returncode == 0, done.stderr
    with tarfile.open(archive) as found:
        names = {Path(name).name for name in found.getnames()}
    assert {"gpu_ncu.json", "ncu.out", "ncu.log"} <= names


@pytest.mark.parametrize("name", ["PYTHON", "WHEELS", "RESULTS", "ARCHIVE"])
def test_what_would_leave_no_result_is_said_before_any_step(day: Any, tmp_path: Path, name: str) -> None:
    """A Python that is not there, a wheel that was half copied, and places that cannot be written to."""
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "half-1.whl").write_bytes(b"PK\x03\x04half")
    (tmp_path / "none").touch()
    place = str(tmp_path / ("file" if name == "WHEELS" else "none/x"))
    done = day("versions", **{name: place})
    assert done.returncode == 1
    assert re.fullmatch(rf"gpu_day: {name}.*{re.escape(place)}.*\n", done.stderr)


@pytest.mark.parametrize(("version", "found"), sample(1, [("22809", "it is 2.28"), (None, "there is none")]))
def test_several_ranks_on_one_gpu_are_skipped_with_the_reason(
    day: Any, tmp_path: Path, version: str | None, found: str
) -> None:
    """Where NCCL cannot have them; and several GPUs, where there is one."""
    cupy = tmp_path / "tools" / "cupy" / "cuda"
    cupy.mkdir(parents=True)
    (cupy / "runtime.py").write_text("def getDeviceCount(): return 1\n")
    if version:
        (cupy / "nccl.py").write_text(f"def get_version(): return {version}\n")
    done = day("ranks", "node", standins={})
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        f"gpu_day: ranks: skipped: several ranks on one GPU need NCCL 2.30, and {found}",
        "gpu_day: node: skipped: it needs two GPUs or more, and there is 1 here",
        "gpu_day: all 2 steps done",
    ]
    assert not written(tmp_path)


def test_the_three_calls_are_all_steps_but_four() -> None:
    lines = SCRIPT.read_text().splitlines()
    calls = [line for line in lines if re.match(r"(FIRST|SECOND|THIRD)=\(", line)]
    assert len(calls) == 3
    assert set(STEPS) - set(re.findall(r"\w+", " ".join(calls))) == {"initcheck", "ranks", "compare", "node"}


def test_another_word_than_a_step_starts_nothing(day: Any) -> None:
    done = day("versions", "ncuu")
    assert done.returncode == 64
    assert done.stderr == f"gpu_day: no step is called ncuu: {' '.join(STEPS)}\n"


def test_steps_write_what_their_tools_found(day: Any, tmp_path: Path) -> None:
    done = day("memcheck", "ncu", standins={"compute-sanitizer": CLEAN, "ncu": ncu_table()})
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("gpu_day: all 2 steps done\n")
    files = written(tmp_path)
    assert sorted(files) == ["gpu_memcheck.json", "gpu_ncu.json"]
    for name, facts in files.items():
        assert facts["step"] == name[4:-5]
        assert facts["problem"] is None
        assert facts["machine"]["packages"]["numpy"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", facts["date"])
        assert str(tmp_path) not in " ".join(facts["command"])
    assert files["gpu_memcheck.json"]["command"][:5] == [
        "compute-sanitizer", "--log-file", "FILE", "--tool", "memcheck"
    ]  # fmt: skip
    assert files["gpu_memcheck.json"]["result"] == {"errors": 0, "first": []}
    launches = files["gpu_ncu.json"]["result"]
    assert [(row["heads"], row["kv_heads"], row["tokens"]) for row in launches] == list(LARGE)
    assert launches[0]["microseconds"] == pytest.approx(195.424)
    assert launches[0]["dram_percent"] == 83.41
    assert launches[0]["occupancy_percent"] == 30.08
    assert list(launches[0]["stalled_warps"].items()) == [("long_scoreboard", 9.71), ("barrier", 0.12)]


def test_a_step_that_fails_stops_no_other_and_the_first_is_the_exit_code(day: Any, tmp_path: Path) -> None:
    tools = {
        "compute-sanitizer": HAZARD,
        "ncu": "==ERROR== ERR_NVGPUCTRPERM: no permission to read counters\n",
    }
    done = day("racecheck", "ncu", "host", "compare", standins=tools, MPIEXEC="/nowhere/mpiexec")
    assert done.returncode == STEPS.index("racecheck") + 1
    assert "gpu_day: racecheck: 1 errors: Error: Race reported between Write access" in done.stderr
    assert "gpu_day: ncu: no result: ==ERROR== ERR_NVGPUCTRPERM" in done.stderr
    for step in ("host", "compare"):  # the second one behind variables of NCCL
        assert f"gpu_day: {step}: no result: there is no /nowhere/mpiexec on PATH" in done.stderr
    assert done.stderr.endswith("gpu_day: failed: racecheck ncu host compare\n")
    assert list(written(tmp_path)) == ["gpu_racecheck.json"]
    assert written(tmp_path)["gpu_racecheck.json"]["result"]["errors"] == 1


def test_a_step_that_takes_too_long_is_ended(day: Any, tmp_path: Path) -> None:
    sleeps = "#!/usr/bin/env bash\necho begun\nexec sleep 60\n"
    done = day("ncu", standins={"ncu": ""}, TOOL=sleeps, LIMIT="1")
    assert done.returncode == STEPS.index("ncu") + 1
    assert re.search(r"gpu_day: ncu: no result: it wrote no result; ended after \d+ s\n", done.stderr)
    assert not written(tmp_path)


@pytest.mark.deep
def test_tests_that_take_too_long_keep_what_they_had(day: Any, tmp_path: Path) -> None:
    """By a Python that takes a folder of other tests for tests/gpu: one passes, one has no time left."""
    tests = tmp_path / "other_tests"
    tests.mkdir()
    (tests / "test_two.py").write_text(
        "import os, signal, time\n\ndef test_good(): pass\n\n"
        "def test_endless():\n    os.kill(os.getppid(), signal.SIGALRM)  # timeout\n    time.sleep(600)\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "${{@/#tests\\/gpu/{tests}}}"\n')
    python.chmod(0o755)
    done = day("tests", standins={}, PYTHON=str(python))
    assert done.returncode == STEPS.index("tests") + 1
    facts = written(tmp_path)["gpu_tests.json"]
    assert re.fullmatch(r"ended after \d+ s", facts["problem"])
    assert facts["result"] == {"passed": 1, "failed": {}, "skipped": {}}


@pytest.mark.deep
def test_a_tool_that_fails_after_its_report_is_not_well(day: Any, tmp_path: Path) -> None:
    """The program's own check, of the results, decides as well as the sanitizer."""
    done = day("memcheck", standins={"compute-sanitizer": CLEAN}, CODE="3")
    assert done.returncode == STEPS.index("memcheck") + 1
    assert written(tmp_path)["gpu_memcheck.json"]["problem"] == "exit code 3: without a word"


@pytest.mark.parametrize(
    ("text", "errors", "first"),
    [
        (CLEAN, 0, []),
        (OUT_OF_BOUNDS, 2, ["Invalid __global__ read of size 16 bytes"]),
        (NO_HAZARD, 0, []),
    ],
)
def test_sanitizer_logs(text: str, errors: int, first: list[str]) -> None:
    data, problem = readers.read_sanitizer(text)
    assert data == {"errors": errors, "first": first}
    assert (problem is None) == (errors == 0)


@pytest.mark.parametrize("text", ["", UNUSED, UNUSED + "========= ERROR SUMMARY: 0 errors\n", HAZARD[:200]])
def test_a_log_that_proves_nothing_is_no_result(text: str) -> None:
    with pytest.raises(ValueError, match="watched no program to its end"):
        readers.read_sanitizer(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("==PROF== Connected\n==WARNING== No kernels were profiled.\n", "ncu wrote no table"),
        ("\n".join(ncu_table().splitlines()[:-1]), "ncu saw 3 launches, not 4"),
        (ncu_table().replace("dram_throughput", "dram_thrupt"), "ncu did not collect dram_percent"),
        (ncu_table().replace("issue_stalled", "waiting"), "ncu did not collect why warps stall"),
        (ncu_table(**{"gpu__time_duration.sum": "us"}), "in us, not in nanoseconds"),
    ],
)
def test_a_table_of_something_else_is_no_result(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        readers.read_ncu(text)


def test_reports_of_tests(tmp_path: Path) -> None:
    """pytest's own, of tests that pass, fail, err and are skipped."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\ndef test_good(): pass\n\ndef test_bad(): assert 1 == 2\n\n"
        "@pytest.mark.skip(reason='no second GPU')\ndef test_not(): pass\n\n"
        "@pytest.fixture\ndef broken(): raise OSError('gone')\n\ndef test_err(broken): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-q", "--junitxml", "report.xml"]
    only = {"few": [], "skipped": ["-k", "test_not"]}
    reports = {}
    for name, choice in only.items():
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        subprocess.run([*command, *choice], cwd=tmp_path, capture_output=True, env=environment, check=False)
        reports[name] = (tmp_path / "report.xml").read_text()
    data, problem = readers.read_tests(reports["few"])
    assert data["passed"] == 1
    assert list(data["failed"]) == ["test_some::test_bad", "test_some::test_err"]
    assert data["skipped"] == {"no second GPU": 1}
    assert problem == "2 tests failed, the first is test_some::test_bad"
    with pytest.raises(ValueError, match="no test ran: no second GPU"):
        readers.read_tests(reports["skipped"])


def test_a_report_that_breaks_off_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text("<testsuites><testsuite")
    with pytest.raises(ValueError, match="breaks off"):
        readers.read("tests", tmp_path / "report.xml")
