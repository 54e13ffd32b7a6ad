"""The job scripts without a scheduler: what they would run, what they refuse, and real ranks on this machine.

`tests/slurm` submits them to a real Slurm. Here programs of its names stand in, on real ranks of mpiexec.
"""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.drawn import sample

pytestmark = pytest.mark.slow  # real ranks
ROOT = Path(__file__).resolve().parents[3]
JOBS = ROOT / "jobs"
CACHE = ROOT / "tests/data/smollm2_layer17_4096.safetensors"
BIN = Path(sys.executable).parent
SHORT = ("--schemes", "ring", "--bytes", "288", "--head-dim", "16", "--repetitions", "1")
SCRIPTS = {  # name -> what it is given
    "smoke": (),
    "decode": (CACHE,),
    "compare_schemes": SHORT,
    "library_algorithm": ("ring", *SHORT),
    "scale_ranks": ("1,2", *SHORT),
    "scale_context": ("4k,8k", "--schemes", "ring"),
    "generate": ("MODEL", "--prompt", "two words"),
}
needs_mpiexec = pytest.mark.skipif(
    not (BIN / "mpiexec").exists() and shutil.which("mpiexec") is None, reason="no mpiexec"
)
STAND_INS = {
    "srun": """
echo "srun $*" >> "$CALLS"
while [ "${1#-}" != "$1" ]; do
  case $1 in --ntasks=*) tasks=${1#*=} ;; --multi-prog) programs=$2 ;; esac
  shift
done
echo $$ > "$CALLS.srun"
if [ -n "${programs:-}" ]; then
  model=$(sed -n 's/^0 //p' "$programs")
  exec mpiexec -n 1 $model : -n $((tasks - 1)) $(sed -n 's/^1-[0-9]* //p' "$programs")
fi
exec mpiexec -n "$tasks" "$@" """,
    "scancel": 'echo "scancel $*" >> "$CALLS"; kill -TERM "$(cat "$CALLS.srun")"',
    # Too busy to answer at first, or always.
    "squeue": """[ "$STATE" = none ] && sleep 60
[ -e "$CALLS.squeue" ] && echo ${STATE:-RUNNING} || { touch "$CALLS.squeue"; exit 1; }""",
    "scontrol": 'echo "scontrol $*" >> "$CALLS"',
}
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_SUBMIT_DIR": str(ROOT),
}


@pytest.fixture
def bench(tmp_path):
    """Starts scripts in a folder of their own."""
    return Bench(tmp_path)


class Bench:
    def __init__(self, folder: Path):
        self.folder = folder
        self.calls = folder / "calls"
        self.environment = {
            **{name: value for name, value in os.environ.items() if name[:6] not in ("SLURM_", "TREEAT")},
            "PATH": f"{folder}/bin:{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "CALLS": str(self.calls),
        }  # fmt: skip

    def stand_in(self) -> None:
        """Put programs of Slurm's names on the path."""
        (self.folder / "bin").mkdir()
        for name, text in STAND_INS.items():
            program = self.folder / "bin" / name
            program.write_text(f"#!/bin/bash\n{text}\n")
            program.chmod(0o755)

    def start(self, script: str | Path, *words: object, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(JOBS / script), *map(str, words)], cwd=self.folder, text=True,
            env={**self.environment, **environment}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, script: str | Path, *words: object, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(script, *words, **environment)
        try:
            out, err = process.communicate(timeout=300)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def read(self, name: str) -> str:
        """A file of the one run folder there is."""
        (run,) = (self.folder / "runs").iterdir()
        return (run / name).read_text()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_shows_the_command_and_makes_nothing(script, bench):
    job = {**JOB, "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "6"}
    done = bench.run(f"{script}.sbatch", "--dry-run", *SCRIPTS[script], **job)
    assert done.returncode == 0, done.stderr
    assert "8 ranks on 2 nodes" in done.stderr
    ranks, nodes = (2, 1) if script == "scale_ranks" else (8, 2)
    for line in done.stdout.splitlines():
        assert line.startswith(
            f"srun --kill-on-bad-exit=1 --wait=60 --nodes={nodes} --ntasks={ranks} treeattn "
        )
    assert list(bench.folder.iterdir()) == []


def test_cache_nodes_are_all_ranks_but_one(bench):
    """A dry run shows both programs, or the file of Slurm that names them."""
    job = {**JOB, "SLURM_TASKS_PER_NODE": "4(x2)"}
    done = bench.run("cache_nodes.sbatch", "--dry-run", "python", "my model.py", **job)
    assert done.returncode == 0, done.stderr
    start = (
        "srun --kill-on-bad-exit=1 --wait=60 --nodes=2 --ntasks=8 --multi-prog runs/cache_nodes-7/programs"
    )
    assert done.stdout.strip() == start
    done = bench.run("cache_nodes.sbatch", "--dry-run", "python", "my model.py", TREEATTN_RANKS="4")
    assert done.stdout.strip() == "mpiexec -n 1 python my\\ model.py : -n 3 treeattn cache-node"
    assert list(bench.folder.iterdir()) == []
    done = bench.run("cache_nodes.sbatch", "python", "model.py", TREEATTN_RANKS="1")
    assert done.returncode == 2
    assert "a model process without cache nodes" in done.stdout


@needs_mpiexec
def test_slurm_is_told_of_two_programs(bench):
    bench.stand_in()
    program = "from treeattn import cache_nodes; print(cache_nodes.connect().size, 'nodes')"
    done = bench.run("cache_nodes.sbatch", sys.executable, "-c", program, **JOB)
    assert done.returncode == 0, done.stderr
    assert bench.read("programs").splitlines()[1] == "1-1 treeattn cache-node"
    assert "1 nodes" in bench.read("log")


@pytest.mark.parametrize(
    "words", [(CACHE, "--dry-run"), ("--dry-run", CACHE), (JOBS / "decode.sbatch", CACHE, "--dry-run")]
)
def test_a_dry_run_may_be_asked_for_anywhere(words, bench):
    done = bench.run("mpirun_local.sh", 2, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"mpiexec -n 2 treeattn decode {CACHE} --check --json runs/decode-")
    assert list(bench.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "words", "environment", "shown"),
    [
        ("smoke", (), {"TREEATTN_SITE": "local"}, "mpiexec -n 4"),
        ("smoke", (), {"TREEATTN_SITE": "slurm"}, "srun "),
        # Away from the cluster it takes the sizes of the script.
        ("decode", ("two words.safetensors",), {"TREEATTN_SITE": "slurm"},
         "--nodes=2 --ntasks=16 treeattn decode two\\ words.safetensors --check"),
        ("smoke", (), {**JOB, "SLURM_CPUS_PER_TASK": "3"}, "--ntasks=2 --cpus-per-task=3 treeattn doctor"),
        ("smoke", (), {**JOB, "SLURM_TASKS_PER_NODE": "3"}, "--ntasks=3 "),
        ("smoke", (), {**JOB, "SLURM_TASKS_PER_NODE": "2(x3),1"}, "--ntasks=7 "),
        ("smoke", (), {**JOB, "SLURM_TASKS_PER_NODE": "1,16(x2),4"}, "--ntasks=37 "),
        # Ranks fill nodes before others are used.
        ("scale_ranks", ("4,6",), {**JOB, "SLURM_TASKS_PER_NODE": "4(x4)", "SLURM_JOB_NUM_NODES": "4",
                                   "SLURM_ARRAY_TASK_ID": "1"}, "--nodes=2 --ntasks=6 "),
    ],
)  # fmt: skip
def test_a_launcher_is_given_what_job_and_site_say(script, words, environment, shown, bench):
    done = bench.run(f"{script}.sbatch", "--dry-run", *words, **environment)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


@pytest.mark.parametrize(
    ("site", "shown"),
    [
        ("LAUNCHER=srun\nLAUNCH_OPTIONS=(--mpi=pmix '--comment=a b')\n",
         "--ntasks=4 --mpi=pmix --comment=a\\ b treeattn doctor"),
        ("OLD=$NOT_SET_BEFORE\nLAUNCHER=mpirun\n", "mpiexec -n 4"),  # what it loads may use what is not set
        # Away from a job too, where its modules are not loaded.
        ((JOBS / "sites/EXAMPLE.sh").read_text(), "--ntasks=4 --mpi=pmix --cpu-bind=cores treeattn doctor"),
    ],
)  # fmt: skip
def test_a_site_of_ones_own(site, shown, bench):
    jobs = shutil.copytree(JOBS, bench.folder / "jobs")
    (jobs / "sites/mine.sh").write_text(site)
    done = bench.run(jobs / "smoke.sbatch", "--dry-run", TREEATTN_SITE="mine")
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


@pytest.mark.parametrize(
    ("script", "words", "environment", "remedy"),
    [
        ("decode", (), {}, "usage: sbatch jobs/decode.sbatch"),
        ("generate", ("MODEL",), {}, "usage: sbatch jobs/generate.sbatch"),
        ("scale_ranks", (), {}, "usage: sbatch"),
        ("smoke", (), {"TREEATTN_SITE": "nowhere"}, "jobs/sites/EXAMPLE.sh"),
        ("smoke", (), {"TREEATTN_RANKS": ""}, "mpirun_local.sh RANKS"),
        ("smoke", (), {"TREEATTN_RANKS": "-1"}, "no number of ranks"),
        ("smoke", (), {"TREEATTN_SITE": "slurm"}, "no job of Slurm: sbatch jobs/smoke.sbatch"),
        ("smoke", (), {**JOB, "SLURM_TASKS_PER_NODE": "two"}, "not understood"),
        ("scale_ranks", ("2,4",), {}, "one task of an array"),
        ("scale_ranks", ("2,4",), {"SLURM_ARRAY_TASK_ID": "2"}, "sbatch --array=0-1"),
        ("scale_ranks", ("2,4",), {"SLURM_ARRAY_TASK_ID": "1"}, "4 ranks are wanted and this job has 2"),
        ("scale_ranks", ("2,x",), {"SLURM_ARRAY_TASK_ID": "1"}, "x ranks are wanted"),
        ("smoke", (), {"TREEATTN_RUNS": "/dev/null/runs"}, "set TREEATTN_RUNS"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_remedy(script, words, environment, remedy, bench):
    done = bench.run(f"{script}.sbatch", *words, **{"TREEATTN_RANKS": "2", **environment})
    assert done.returncode == 2, done.stdout + done.stderr
    assert remedy in done.stdout + done.stderr


def test_without_scheduler_or_package_it_says_so(bench):
    tools = bench.folder / "bin"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(shutil.which(name))
    jobs = shutil.copytree(JOBS, bench.folder / "jobs")
    done = bench.run(jobs / "smoke.sbatch", TREEATTN_RANKS="2", PATH=str(tools))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "treeattn is not on the path" in done.stderr


@needs_mpiexec
def test_a_cache_on_this_machine(bench):
    done = bench.run("mpirun_local.sh", 2, CACHE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on 1 node" in done.stdout
    assert bench.read("status") == "done\n"
    assert bench.read("log") == done.stdout
    assert bench.read("command") == f"jobs/decode.sbatch {CACHE} \n"
    assert "2 ranks, 1 nodes" in bench.read("environment")
    assert '"passed": true' in bench.read("results.json")


@needs_mpiexec
def test_what_fails_says_so_and_keeps_its_code(bench):
    done = bench.run("mpirun_local.sh", 2, "nothing.safetensors")
    assert done.returncode == 2
    assert "nothing.safetensors: no such file" in done.stdout
    assert bench.read("status") == "failed 2\n"
    assert "failed with exit code 2; what is finished is kept in runs/" in bench.read("log")


def cut_off(bench: Bench, process: subprocess.Popen, run: Path) -> str:
    """SIGTERM to the script alone, as Slurm sends it, once something is measured; what it said."""
    held = run / "results.jsonl"
    deadline = time.monotonic() + 300
    while not (held.exists() and held.stat().st_size > 10_000) and process.poll() is None:
        assert time.monotonic() < deadline, "nothing was measured"
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143, out + err
    assert "treeattn: ended by SIGTERM: kept" in out
    assert (run / "status").read_text() == "cut off\n"
    return out


LONG = (*SHORT[:-1], "10000")
ENOUGH = (*SHORT[:-1], "30")


@pytest.mark.slow
@needs_mpiexec
def test_a_run_that_is_cut_off_goes_on(bench):
    run = bench.folder / "mine"
    words, again = (2, JOBS / "compare_schemes.sbatch"), {"TREEATTN_RUN": "mine"}
    out = cut_off(bench, bench.start("mpirun_local.sh", *words, *LONG, **again), run)
    assert "TREEATTN_RUN=mine and the same command go on" in out
    done = bench.run("mpirun_local.sh", *words, *ENOUGH, **again)
    assert done.returncode == 0, done.stdout
    assert "are in the file already and are not measured again" in done.stdout
    assert (run / "status").read_text() == "done\n"
    assert len((run / "command").read_text().splitlines()) == 2


@pytest.mark.slow
@needs_mpiexec
@pytest.mark.parametrize(
    ("environment", "requeued", "word"),
    sample(
        1,
        [
            ({}, True, "cut off and requeued"),
            # This task's number is that of its array: 7 would be all of its tasks.
            ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}, True, "cut off and requeued"),
            ({"STATE": "none"}, True, "cut off and requeued"),
            ({"STATE": "SIGNALING"}, True, "cut off and requeued"),  # a busy Slurm, before its limit
            ({"STATE": "COMPLETING"}, False, "ended by Slurm"),  # somebody cancelled it
            ({"SLURM_RESTART_COUNT": "3", "TREEATTN_RESTARTS": "3"}, False, "3 times already"),
        ],
    ),
)
def test_a_job_that_is_cut_off_is_requeued(environment, requeued, word, bench):
    bench.stand_in()
    process = bench.start("compare_schemes.sbatch", *LONG, **JOB, **environment)
    job = "7_1" if "SLURM_ARRAY_JOB_ID" in environment else "7"
    out = cut_off(bench, process, bench.folder / f"runs/compare_schemes-{job}")
    assert word in out
    start, *then = bench.calls.read_text().splitlines()
    assert start.startswith("srun --kill-on-bad-exit=1 --wait=60 --nodes=2 --ntasks=2 treeattn compare")
    assert then == [f"scancel --signal=TERM {job}"] + [f"scontrol requeue {job}"] * requeued


@needs_mpiexec
def test_a_requeued_job_has_nothing_left_to_do(bench):
    bench.stand_in()
    first = bench.run("decode.sbatch", CACHE, "--repeat", 1, **JOB)
    again = bench.run("decode.sbatch", CACHE, "--repeat", 1, **JOB, SLURM_RESTART_COUNT="1")
    assert (first.returncode, again.returncode) == (0, 0), first.stdout
    assert "results.json is there already" in again.stdout
    assert bench.calls.read_text().count("srun") == 1


@pytest.mark.deep
@needs_mpiexec
def test_tasks_of_an_array_have_folders_of_their_own_and_are_collected(bench):
    bench.stand_in()
    for task in ("0", "1"):
        array = {**JOB, "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": task}
        done = bench.run("scale_ranks.sbatch", "1,2", *SHORT, **array)
        assert done.returncode == 0, done.stdout
    runs = bench.folder / "runs"
    assert sorted(run.name for run in runs.iterdir()) == ["scale_ranks-6_0", "scale_ranks-6_1"]
    (runs / "scale_ranks-6_1/status").write_text("cut off\n")
    done = collect(bench, *runs.iterdir())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scale_ranks-6_1: cut off; what it has is in the table" in done.stderr
    with (bench.folder / "collected/table.csv").open() as file:
        rows = list(csv.DictReader(file))
    of_ring = [row for row in rows if row["scheme"] == "ring"]
    assert sorted((row["run"], row["ranks"], row["nodes"]) for row in of_ring) == [
        ("scale_ranks-6_0", "1", "1"), ("scale_ranks-6_1", "2", "1")
    ]  # fmt: skip
    assert all(float(row["median_us"]) > 0 for row in of_ring)
    assert list((bench.folder / "collected/figures").glob("*.svg"))


def collect(bench: Bench, *words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(JOBS / "collect.py"), *map(str, words)]
    return subprocess.run(
        command, cwd=bench.folder, env=bench.environment, capture_output=True, text=True, timeout=300
    )


def test_folders_that_hold_no_run_are_named(bench):
    (bench.folder / "empty").mkdir()
    broken = bench.folder / "broken"
    broken.mkdir()
    (broken / "status").write_text("done\n")
    (broken / "results.json").write_text('{"results": [{}], "ranks": []}')
    done = collect(bench, "empty", "broken", "nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    for name in ("empty", "broken", "nowhere"):
        assert f"collect: {name}: no run folder that can be read" in done.stderr
    assert "no results in these folders" in done.stderr


def test_nothing_is_absolute():
    for script in [*JOBS.glob("*.sbatch"), *JOBS.glob("*.sh"), *(JOBS / "sites").iterdir()]:
        paths = re.findall(r"""(?<=[\s"'=:>!])/(?:[a-z]+/)+[a-z]*""", script.read_text())
        assert set(paths) <= {"/usr/bin/env", "/dev/null"}, script.name
