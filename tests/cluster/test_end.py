"""However a cluster ends, nothing of it stays: no process, namespace, link, mount or file."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from .conftest import PROGRAMS, SCRIPT


def namespaces_in_use() -> set[str]:
    """Of all processes; a zombie counts too, by its PID namespace."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/*"):
        with contextlib.suppress(OSError):  # the process has ended in the meantime
            found.add(os.readlink(link))
    return found


def outside() -> tuple[list[str], str, bool]:
    """What the machine has besides processes: links, mounts, and the cluster's folder in memory."""
    links = [line.split()[1] for line in subprocess.getoutput("ip -oneline link").splitlines()]
    return links, Path("/proc/self/mountinfo").read_text(), Path("/dev/shm/cluster").exists()


def wait_until_unused(namespaces: set[str]) -> None:
    deadline = time.monotonic() + 20
    while namespaces & namespaces_in_use():
        assert time.monotonic() < deadline, f"still in use: {namespaces & namespaces_in_use()}"
        time.sleep(0.05)


def waiting(cluster, mpi, *options):
    """A running cluster of 2 x 2 with all of its parts, and what its program told of itself."""
    program = (mpi / "python", PROGRAMS / "wait_to_be_ended.py")
    shape = ("--nodes", 2, "--ranks-per-node", 2)
    process = cluster.start(*shape, *options, "--", mpi / "mpiexec", "-n", 4, *program)
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return process, json.loads(line)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name
)
def test_nothing_is_left_after_a_signal(cluster, mpi, delays, number):
    before = outside()
    process, told = waiting(cluster, mpi, "--delay", "0.1ms")
    assert set(told["namespaces"]) <= namespaces_in_use()
    process.send_signal(number)
    code = process.wait(timeout=20)
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    wait_until_unused(set(told["namespaces"]))
    assert outside() == before
    assert not [path for path in told["files"] if os.path.exists(path)]
    assert told["scratch"].startswith("/dev/shm/")


def test_ctrl_c_reaches_all_processes_of_the_terminal_at_once(cluster, mpi, delays):
    process, told = waiting(cluster, mpi, "--delay", "0.1ms")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 128 + signal.SIGINT
    wait_until_unused(set(told["namespaces"]))
    assert "ended before the command did" not in process.stderr.read()


def test_a_cluster_whose_first_process_is_killed(cluster):
    process = cluster.start("--nodes", 1, "--", "sh", "-c", "readlink /proc/self/ns/net; sleep 300")
    namespace = process.stdout.readline().strip()
    (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGKILL)
    assert process.wait(timeout=20) == 128 + signal.SIGKILL
    wait_until_unused({namespace})


def test_nothing_is_left_after_the_time_limit(cluster, mpi):
    before = outside()
    command = (mpi / "mpiexec", "-n", 2, mpi / "python", PROGRAMS / "wait_to_be_ended.py")
    words = [*map(str, (sys.executable, SCRIPT, "--nodes", 2, "--", *command))]
    done = subprocess.run(["timeout", "5", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 124
    told = json.loads(done.stdout.splitlines()[0])
    wait_until_unused(set(told["namespaces"]))
    assert outside() == before
    assert not [path for path in told["files"] if os.path.exists(path)]


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_commands_and_what_it_left_running_ends(cluster, code):
    before = outside()
    script = f"readlink /proc/self/ns/net /proc/self/ns/pid; sleep 300 >/dev/null 2>&1 & exit {code}"
    done = cluster.run("--nodes", 2, "--", "sh", "-c", script)
    assert done.returncode == code, done.stderr
    wait_until_unused(set(done.stdout.split()))
    assert outside() == before


def test_an_abort_on_another_node_ends_the_job_and_the_cluster(cluster, mpi):
    program = "import time; from mpi4py.MPI import COMM_WORLD as world; "
    program += "world.Abort(5) if world.rank == 3 else time.sleep(300)"
    shape = ("--nodes", 2, "--ranks-per-node", 2)
    done = cluster.run(*shape, "--", mpi / "mpiexec", "-n", 4, mpi / "python", "-c", program)
    assert done.returncode == 5, done.stderr


def test_the_command_may_be_signalled_as_it_may_outside(cluster):
    look = ("grep", "-E", "SigIgn|SigBlk", "/proc/self/status")
    outside_it = subprocess.run(look, capture_output=True, text=True)
    assert cluster.run("--nodes", 1, "--", *look).stdout == outside_it.stdout


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (("sh", "-c", "kill -TERM $$"), 128 + signal.SIGTERM, ""),
        (("no-such-command",), 127, "no-such-command"),
        (("/dev/shm/cluster/remote_shell", "node7", "hostname"), 255, "no node node7"),
        (("sh", "-c", f"[ $PWD = {os.getcwd()} ] && ls setup.cfg"), 0, ""),  # where it was started
    ],
)
def test_how_commands_end(cluster, command, code, said):
    done = cluster.run("--nodes", 1, "--", *command)
    assert done.returncode == code, done.stderr
    assert said in done.stderr


def test_losing_the_delay_ends_the_cluster_with_the_reason(cluster, delays):
    """Rather than going on without a delay, or without a network."""
    script = "for process in /proc/[0-9]*; do grep -q [p]acket_delay.py $process/cmdline"
    script += " && kill -KILL ${process#/proc/}; done; sleep 300"
    before = outside()
    done = cluster.run("--nodes", 2, "--delay", "1ms", "--", "sh", "-c", script)
    assert done.returncode == 1
    assert "the process that delays packets ended" in done.stderr
    assert outside() == before


@pytest.mark.parametrize(
    ("broken", "options", "remedy"),
    [("tc", (), "--bandwidth none"), ("ip", (), "modprobe bridge"), ("cc", ("--yield",), "--yield")],
)
def test_a_failing_program_is_one_line_with_the_remedy(cluster, tmp_path, broken, options, remedy):
    """As on a kernel without the feature: the program is there and fails."""
    fake = tmp_path / broken
    fake.write_text("#!/bin/sh\necho not supported >&2\nexit 2\n")
    fake.chmod(0o755)
    before = outside()
    done = cluster.run("--nodes", 2, *options, "--", "true", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert remedy in done.stderr
    assert "not supported" in done.stderr
    assert done.stderr.count("\n") == 1
    assert outside() == before


def test_folders_that_the_nodes_cannot_see_are_refused(cluster):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as hidden:
        done = cluster.run("--nodes", 1, "--", "true", folder=hidden)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"emulated_cluster: {hidden} is hidden from the nodes")
        jobs = shutil.copytree(PROGRAMS.parents[2] / "jobs", Path(hidden, "jobs"))
        done = cluster.run("--nodes", 1, "--", "true", script=jobs / "emulated_cluster")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"emulated_cluster: {jobs} is hidden from the nodes")


def test_a_folder_that_is_gone_is_refused(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    start = 'cd "$1" && rmdir "$1" && exec "$2" "$3" --nodes 1 -- true'
    words = ["sh", "-c", start, "sh", gone, sys.executable, SCRIPT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the current folder has been removed" in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_the_exit_code_does_not_need_standard_streams(closed):
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, SCRIPT]
    done = subprocess.run([*words, "--nodes", "1", "--", "sh", "-c", "exit 7"], timeout=30)
    assert done.returncode == 7


@pytest.mark.parametrize(("right", "options"), [("net_admin", ()), ("sys_nice", ("--delay", "1ms"))])
def test_root_without_its_rights_is_told_so(right, options, delays):
    if shutil.which("setpriv") is None:
        pytest.skip("not installed: setpriv")
    words = ["setpriv", f"--bounding-set=-{right}", f"--inh-caps=-{right}", sys.executable, SCRIPT]
    done = subprocess.run([*words, *options, "--", "true"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "a container must be privileged" in done.stderr
    assert done.stderr.count("\n") == 1


def test_missing_programs_are_named_before_anything_is_made(cluster, tmp_path):
    (tmp_path / "ip").symlink_to("/bin/true")
    done = cluster.run("--nodes", 2, "--delay", "1ms", "--", "true", PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("emulated_cluster: tc, nsenter, iptables not found")
