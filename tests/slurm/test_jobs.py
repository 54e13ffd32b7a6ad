"""Every job script, submitted for real: as it should go, cut off, and with nodes that die or are missing."""

import csv
import errno
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import CACHE, NODES, ROOT, lines, numbers, placed

SIZE = "--nodes=2 --ntasks-per-node=2"
SHORT = ("--schemes", "hierarchical", "--bytes", 288, "--repetitions", 2, "--head-dim", 16)
# Six points that are measured for ten seconds each, however fast the machine is.
TIMED = ("--schemes", "hierarchical,bine,ring,chain,binary_tree", "--bytes", 288, "--head-dim", 16,
         "--repetitions", 10000)  # fmt: skip


def test_every_script(slurm, model):
    """All at once: they wait for nodes as jobs of other people would. First the one that wants all nodes."""
    jobs = {
        "decode": slurm.submit("--nodes=4 --ntasks-per-node=2", "decode", CACHE, "--repeat", 2),
        "smoke": slurm.submit(SIZE, "smoke"),
        "compare": slurm.submit(SIZE, "compare_schemes", *SHORT),
        "generate": slurm.submit(SIZE, "generate", model, "--prompt-ids", "1,2,3,4,5", "-n", 3),
    }
    ranks = slurm.submit(f"{SIZE} --array=0-1", "scale_ranks", "2,4", *SHORT)
    context = slurm.submit(
        f"{SIZE} --array=0-1", "scale_context", "4k,8k", "--schemes", "bine", "--repetitions", 2
    )
    tasks = [f"{job}_{task}" for job in (ranks, context) for task in (0, 1)]
    nodes = {job: numbers(slurm.done(job)["NodeList"]) for job in [*jobs.values(), *tasks]}
    for job in nodes:
        assert (slurm.run(job) / "status").read_text() == "done\n"
    for name, each in (("decode", 2), ("smoke", 2), ("generate", 2)):
        facts = json.loads((slurm.run(jobs[name]) / "results.json").read_text())
        assert placed(facts["ranks"]) == [node for node in nodes[jobs[name]] for _ in range(each)]
    decoded = json.loads((slurm.run(jobs["decode"]) / "results.json").read_text())
    assert all(row["passed"] and row["errors"] for row in decoded["results"])
    compared = [jobs["compare"], *tasks]
    assert [lines(slurm.run(job))[0]["ranks"] for job in compared] == [4, 2, 4, 4, 4]
    tokens = [{row["tokens"] for row in lines(slurm.run(job))} for job in tasks[2:]]
    assert tokens == [{4000}, {8000}]
    if slurm.mpi == "mpich":  # drawing takes long, and results are the same with each
        collected(slurm, [slurm.run(job) for job in nodes])


def collected(slurm, runs: list[Path]) -> None:
    out = slurm.folder / "collected"
    done = slurm.command(sys.executable, "jobs/collect.py", *runs, "--out", out, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    with (out / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {run.name for run in runs}
    assert any(row["nodes"] == "4" for row in rows)
    assert list((out / "figures").glob("*.svg"))


def test_a_model_process_and_cache_nodes(slurm):
    """Two programs of one job, by srun --multi-prog."""
    job = slurm.submit(SIZE, "cache_nodes", "python", ROOT / "tests/cluster/programs/model_process.py")
    assert len(numbers(slurm.done(job)["NodeList"])) == 2
    (found,) = (json.loads(line) for line in slurm.said(job).splitlines() if line.startswith("{"))
    assert (found["nodes"], found["totals"]) == (3, [[20], [20]])
    assert found["error"] < 1e-6


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed (the extra `huggingface`)",
)
def test_a_model_of_transformers(mpich):
    """On ranks that srun starts, and over the cache nodes of a job."""
    program = ROOT / "tests/cluster/programs/model_of_transformers.py"
    ranks = "srun", "--nodes=2", "--ntasks-per-node=2", "python", "-m", "mpi4py"
    done = mpich.command(*ranks, program, timeout=120, OMP_NUM_THREADS="1")
    assert done.stdout.splitlines() == ["the same text"] * 4, done.stderr
    job = mpich.submit(SIZE, "cache_nodes", "python", program, "nodes")
    mpich.done(job)
    assert "the same text" in mpich.said(job)


def test_mpiexec_within_a_job_asks_slurm_for_its_nodes(slurm):
    job = slurm.submit("--nodes=2 --ntasks-per-node=2", "decode", CACHE, "--repeat", 1, TREEATTN_SITE="local")
    nodes = numbers(slurm.done(job)["NodeList"])
    facts = json.loads((slurm.run(job) / "results.json").read_text())
    assert sorted(placed(facts["ranks"])) == sorted(2 * nodes)
    assert "+ mpiexec -n 4 treeattn decode" in slurm.said(job)


def test_a_job_cut_off_by_its_time_limit_goes_on(mpich):
    """Slurm looks every half minute: of a minute, the warning comes after 10 to 40 seconds."""
    job = mpich.submit(f"{SIZE} --time=1 --signal=B:TERM@20", "compare_schemes", *TIMED)
    facts = mpich.done(job)
    assert int(facts["Restarts"]) >= 1
    assert (mpich.run(job) / "status").read_text() == "done\n"
    starts = (mpich.run(job) / "command").read_text().splitlines()
    assert len(starts) == int(facts["Restarts"]) + 1
    assert_goes_on_from_what_is_kept(lines(mpich.run(job)))
    assert len({row["scheme"] for row in lines(mpich.run(job))}) == 6


def assert_goes_on_from_what_is_kept(results):
    """Starts add to one file: what an earlier one measured stays, and no block is measured twice."""
    assert len({row["run"] for row in results}) > 1
    assert results[0]["run"] != results[-1]["run"]
    measured = [(row["scheme"], row["repetition"]) for row in results]
    assert len(measured) == len(set(measured))


def test_a_task_of_an_array_that_is_cut_off_leaves_the_others_alone(mpich):
    """That task whose number is the array's: what is said of the number is meant for all of them."""
    array = mpich.submit(f"{SIZE} --array=0-1", "scale_ranks", "4,4", *TIMED)
    tasks = {f"{array}_{task}": begins_to_measure(mpich, f"{array}_{task}") for task in (0, 1)}
    (first,) = [task for task, facts in tasks.items() if facts["JobId"] == str(array)]
    assert mpich.command("scancel", "--batch", "--signal=TERM", first).returncode == 0
    restarts = {task: mpich.done(task)["Restarts"] for task in tasks}
    assert restarts == {task: "1" if task == first else "0" for task in tasks}


def begins_to_measure(slurm, job: int | str) -> dict[str, str]:
    def some(facts: dict[str, str]) -> bool:
        found = list((slurm.folder / "runs").glob(f"*-{job}/results.jsonl"))
        return bool(found) and len(found[0].read_text().splitlines()) > 3

    return slurm.wait(job, some)


def test_a_job_that_is_cancelled_stays_so(mpich):
    job = mpich.submit(SIZE, "compare_schemes", *TIMED)
    begins_to_measure(mpich, job)
    assert mpich.command("scancel", job).returncode == 0
    status = mpich.run(job) / "status"
    mpich.wait(job, lambda _: status.read_text() == "cut off\n")
    facts = mpich.ended(job)
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0")


def test_a_job_survives_the_death_of_a_node(mpich):
    job = mpich.submit(SIZE, "compare_schemes", *TIMED)
    _, second = numbers(begins_to_measure(mpich, job)["NodeList"])
    die(second)
    facts = mpich.done(job)
    assert facts["Restarts"] == "1"
    assert second not in numbers(facts["NodeList"])
    assert_goes_on_from_what_is_kept(lines(mpich.run(job)))
    hosts = list(dict.fromkeys(row["hosts"] for row in lines(mpich.run(job))))
    assert len(hosts) == 2
    assert second in hosts[0]
    assert second not in hosts[1]
    revive(mpich, second)


def on_node(node: str, command: str) -> None:
    subprocess.run(["/dev/shm/cluster/remote_shell", node, command], check=True, timeout=30)


def die(node: str) -> None:
    """No packet more, and then no process, but the one that is the emulated node."""
    on_node(node, "ip link set eth0 down")
    itself = int(Path(f"/dev/shm/cluster/{node}.pid").read_text())
    network = Path(f"/proc/{itself}/ns/net").stat().st_ino
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        if pid != itself and (process / "ns/net").exists() and (process / "ns/net").stat().st_ino == network:
            subprocess.run(["kill", "-KILL", str(pid)], check=False, capture_output=True)


def revive(slurm, node: str) -> None:
    on_node(node, "ip link set eth0 up && slurmd")
    deadline = time.monotonic() + 60
    while slurm.command("sinfo", "-hn", node, "-o", "%T").stdout.strip() != "idle":
        assert time.monotonic() < deadline, slurm.command("sinfo", "-Nl").stdout
        time.sleep(0.5)


def test_fewer_nodes_than_asked_for(mpich):
    gone = f"nodename={NODES[3]}"
    mpich.command("scontrol", "update", gone, "state=drain", "reason=test")
    try:
        job = mpich.submit("--nodes=2-4 --ntasks-per-node=2", "decode", CACHE, "--repeat", 1)
        assert mpich.done(job)["NumNodes"] == "3"
        array = mpich.submit("--nodes=2-4 --ntasks-per-node=2 --array=1", "scale_ranks", "2,8", *SHORT)
        assert mpich.ended(f"{array}_1")["ExitCode"] == "2:0"
    finally:
        mpich.command("scontrol", "update", gone, "state=resume")
    facts = json.loads((mpich.run(job) / "results.json").read_text())
    assert placed(facts["ranks"]) == [node for node in NODES[:3] for _ in range(2)]


def test_a_partition_that_is_not_there(mpich):
    done = mpich.command("sbatch", "--partition=nowhere", "jobs/smoke.sbatch")
    assert done.returncode != 0
    assert "invalid partition specified: nowhere" in done.stderr


@pytest.fixture
def small_disk(tmp_path):
    """Scratch space of 40 KiB on node0 alone."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_full_scratch_disk(mpich, small_disk):
    options = f"{SIZE} --nodelist={NODES[0]}"
    job = mpich.submit(options, "compare_schemes", *TIMED, TREEATTN_RUNS=str(small_disk))
    assert mpich.ended(job)["JobState"] == "FAILED"
    assert os.strerror(errno.ENOSPC) in mpich.said(job)
    (run,) = small_disk.iterdir()
    kept = (run / "results.jsonl").read_text()
    assert len([json.loads(line) for line in kept.split("\n")[:-1]]) > 3


def test_the_checkout_is_where_scripts_are_submitted_from(mpich):
    done = subprocess.run(
        ["sbatch", "--parsable", f"--output={mpich.folder}/%A-%a-%j.out", ROOT / "jobs/smoke.sbatch"],
        cwd=mpich.folder, env=mpich.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    job = int(done.stdout)
    assert mpich.ended(job)["ExitCode"] == "2:0"
    assert "jobs/lib.sh" in mpich.said(job)
