"""What an emulated cluster is asked for, and what it refuses: all that needs no root."""

import os
import runpy
import shutil
import struct
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).resolve().parents[3] / "jobs"
sys.path.insert(0, str(JOBS))

from emulation import launchers, packet_delay, tools  # noqa: E402
from emulation.plan import parse  # noqa: E402


@pytest.fixture(scope="module")
def emulated_cluster():
    """The script, given words."""
    return runpy.run_path(str(JOBS / "emulated_cluster"))["main"]


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("", "nodes", 4),
        ("", "ranks_per_node", (1,) * 4),
        ("", "placement", "block"),
        ("", "bandwidth", 10**9),
        ("", "delay", 0),
        ("--ranks-per-node 3,1", "nodes", 2),
        ("--ranks-per-node 3,1", "ranks_per_node", (3, 1)),
        ("--bandwidth 100mbit", "bandwidth", 10**8),  # bits a second
        ("--bandwidth 2.5gbit", "bandwidth", 25 * 10**8),
        ("--bandwidth 1kbit", "bandwidth", 1000),
        ("--bandwidth none", "bandwidth", None),
        ("--delay 0.1ms", "delay", 10**5),  # nanoseconds
        ("--delay 1us", "delay", 1000),
        ("--delay 10s", "delay", 10**10),
        ("--traffic 30%", "traffic", (0.3, 1 << 16)),
        ("--traffic 5%:512", "traffic", (0.05, 512)),
        ("--traffic 50%:1Mi", "traffic", (0.5, 1 << 20)),
        ("--noise 10us/1ms", "noise", (10.0, 1000.0)),
    ],
)
def test_words_are_read(words, field, value):
    plan = parse([*words.split(), "--", "env", "--", "true"])
    assert getattr(plan, field) == value
    assert plan.command == ("env", "--", "true")
    assert not plan.yield_cores
    assert not plan.measure


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--noise 5us -- true", "10us/1ms"),
        ("--noise 5us/1us -- true", "10us/1ms"),
        ("--traffic 100% -- true", "30%"),
        ("--traffic 30% --bandwidth none -- true", "--bandwidth"),
        ("--nodes 0 -- true", "from 1 to 64"),
        ("--nodes 65 -- true", "from 1 to 64"),
        ("--nodes many -- true", "from 1 to 64"),
        ("--ranks-per-node -1 -- true", "from 1 to 1024"),
        ("--ranks-per-node 3, -- true", "from 1 to 1024"),
        ("--ranks-per-node 3,1 --nodes 4 -- true", "--nodes 2"),
        ("--ranks-per-node 3,1 --placement cyclic -- true", "as many ranks on every node"),
        ("--placement random -- true", "'block', 'cyclic'"),
        ("--bandwidth fast -- true", "1gbit, or none"),
        ("--bandwidth 0gbit -- true", "at least 1kbit"),
        ("--bandwidth 100mbps -- true", "kbit, mbit, gbit"),
        (f"--bandwidth {'9' * 400}gbit -- true", "none for no limit"),
        ("--bandwidth 1001gbit -- true", "none for no limit"),
        ("--delay 5 -- true", "0.1ms"),
        ("--delay 11s -- true", "10s"),
        (f"--delay {'9' * 400}s -- true", "10s"),
        ("--delay 0.5us -- true", "0us for none"),
        ("--node 4 -- true", "unknown argument '--node'"),
        ("mpiexec -n 4 true", "put -- before the command"),
        ("--nodes 4", "no command"),
        ("--nodes 4 --", "no command"),
        ("--nodes 1 --measure", "--nodes 2"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(words, remedy, emulated_cluster, capsys):
    with pytest.raises(SystemExit) as left:
        emulated_cluster(words.split())
    assert left.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert remedy in said.err
    assert said.err.startswith("emulated_cluster: ")
    assert said.err.count("\n") == 1


def test_missing_programs_name_their_packages(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("tc", "iptables") else f"/bin/{name}")
    with pytest.raises(tools.Refusal, match="tc, iptables not found: install iproute2 iptables"):
        tools.require(["ip", "tc", "nsenter", "iptables"])


def test_missing_rights_are_not_taken_for_a_missing_feature():
    assert "privileged" in tools.explained("RTNETLINK answers: Operation not permitted", "modprobe bridge")
    assert tools.explained("Unknown device type", "modprobe bridge") == "modprobe bridge"


def test_the_older_iptables_is_tried_first(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "iptables" else f"/bin/{name}")
    assert tools.iptables() == ["/bin/iptables-legacy", "/bin/iptables-nft"]


@pytest.mark.parametrize(
    ("module", "name", "value", "said"),
    [(os, "geteuid", lambda: 65534, "needs root"), (sys, "version_info", (3, 9, 18), "needs Python 3.10")],
)
def test_what_the_machine_lacks_is_told_first(
    module, name, value, said, emulated_cluster, monkeypatch, capsys
):
    with monkeypatch.context() as lacking:
        lacking.setattr(module, name, value)
        assert emulated_cluster(["--nodes", "2", "--", "true"]) == 1
    assert capsys.readouterr().err.startswith(f"emulated_cluster: {said}")


@pytest.mark.parametrize(
    ("words", "mpich", "openmpi"),
    [
        ("--ranks-per-node 3,1", "node0:3\nnode1:1\n", "node0 slots=3\nnode1 slots=1\n"),
        ("--nodes 2 --ranks-per-node 3", "node0:3\nnode1:3\n", "node0 slots=3\nnode1 slots=3\n"),
        ("--nodes 2 --ranks-per-node 3 --placement cyclic", "node0:1\nnode1:1\n",
         "node0 slots=3\nnode1 slots=3\n"),
    ],
)  # fmt: skip
def test_host_files_place_ranks(words, mpich, openmpi):
    plan = parse([*words.split(), "--", "true"])
    files = launchers.host_files(plan)
    assert (files["mpich_hosts"], files["openmpi_hosts"]) == (mpich, openmpi)
    policy = launchers.environment(plan, "/files", {})["PRTE_MCA_rmaps_default_mapping_policy"]
    assert policy == ("node" if plan.placement == "cyclic" else "slot")


def test_environment_keeps_the_callers_tuning_but_not_the_callers_nodes():
    caller = {"PATH": "/bin", "OMPI_MCA_btl": "self,tcp", "HYDRA_HOST_FILE": "elsewhere"}
    made = launchers.environment(parse(["--", "true"]), "/files", caller)
    assert made["PATH"] == "/bin"
    assert made["OMPI_MCA_btl"] == "self,tcp"
    assert made["HYDRA_HOST_FILE"] == "/files/mpich_hosts"
    assert made["HYDRA_LAUNCHER_EXEC"] == made["PRTE_MCA_plm_ssh_agent"] == "/files/remote_shell"


def packet(number: int) -> bytes:
    """The kernel's message about one packet: an attribute to skip, then the header with its number."""
    header = struct.pack(">IHB", number, 0x0800, 0)
    attributes = packet_delay.attribute(9, bytes(6)) + packet_delay.attribute(1, header)
    return struct.pack("=IHHII", 20 + len(attributes), 3 << 8, 0, 0, 0) + bytes(4) + attributes


def test_packets_are_read_from_messages_of_the_kernel():
    error = struct.pack("=IHHII", 16 + 20, 2, 0, 0, 0) + bytes(20)
    assert packet_delay.packet_numbers(packet(7) + error + packet(8)) == [7, 8]


def test_messages_are_padded_to_four_bytes():
    odd = bytearray(packet(7))
    struct.pack_into("=I", odd, 0, len(odd) - 1)
    assert packet_delay.packet_numbers(bytes(odd) + packet(8)) == [7, 8]


def test_a_packet_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="without a packet header"):
        packet_delay.packet_numbers(struct.pack("=IHHII", 20, 3 << 8, 0, 0, 0) + bytes(4))
