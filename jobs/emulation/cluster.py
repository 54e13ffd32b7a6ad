"""The inside of an emulated cluster: its first process, its nodes and the links between them.

The first process is PID 1 of a PID namespace, so the kernel ends every other process with it, and with the
last process go all namespaces, links and mounts. Nothing is written outside: its files are in memory.
"""

from __future__ import annotations

import contextlib
import glob
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from emulation import kernel, launchers, tools
from emulation.plan import Plan
from emulation.tools import Refusal

__all__ = ["MEMORY", "live"]

HERE = Path(__file__).resolve().parent
MEMORY = "/dev/shm"  # each node's own; the cluster's files are in `SHARED` on every node
SHARED = f"{MEMORY}/cluster"
SCRATCH = f"{MEMORY}/tmp"
CONTROL_GROUPS = "/sys/fs/cgroup"
SLEEPER = "sleep_when_yielding"
SUBNET = "10.213.77"
# What goes at once is sent without shaping. TCP hands a device up to 64 KiB at once, half a millisecond of
# 1 Gbit/s: devices are told to take less. A shaper's timer needs some 100 microseconds of traffic at least.
LEAST_SEGMENT, MOST_SEGMENT, TIMER = 8 * 1024, 62 * 1024, 100e-6
NO_BRIDGE = "this kernel makes no bridges or veth pairs: `modprobe bridge veth`, or a kernel with both"
NO_SHAPING = "this kernel shapes no traffic: `modprobe sch_tbf`, or --bandwidth none"
NO_QUEUE = (
    "this kernel has no NFQUEUE target: `modprobe xt_NFQUEUE nfnetlink_queue iptable_raw`, or no --delay"
)
# MPICH's proxies keep this file open while they run and remove it at the end, unless they are killed.
LAUNCHER_FILE = "/tmp/hydra_hwloc_xmlfile_"


def live(plan: Plan, alive: int) -> NoReturn:
    """Be the cluster's first process until the command ends. The pipe `alive` closes with the parent."""
    code = 1
    try:
        _end_with_parent(alive)
        code = _build_and_run(plan)
    except Refusal as refusal:
        print(f"emulated_cluster: {refusal}", file=sys.stderr)
    except OSError as error:
        print(f"emulated_cluster: {error}: does root have all its rights here?", file=sys.stderr)
    except SystemExit:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _remove_launcher_files()
        os._exit(code)


def _end_with_parent(alive: int) -> None:
    def end(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would come in the middle of the end
        raise SystemExit

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as SIGHUP: PID 1 is immune to it, unlike the command
    kernel.signal_at_parents_end(signal.SIGTERM)
    if select.select([alive], [], [], 0)[0]:
        raise SystemExit  # the parent was gone before it could be watched


def _remove_launcher_files() -> None:
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
            if target.startswith(LAUNCHER_FILE):
                os.unlink(target)
        except OSError:
            pass  # ended, closed or removed in the meantime


def _build_and_run(plan: Plan) -> int:
    caller, folder = dict(os.environ), os.getcwd()
    kernel.isolate(kernel.NEW_MOUNT | kernel.NEW_NETWORK)
    kernel.keep_mounts_private()
    kernel.mount("proc", "/proc")
    kernel.mount("tmpfs", MEMORY)
    names = [f"node{index}" for index in range(plan.nodes)]
    _write_files(plan, names)
    nodes = {name: _start_node(name) for name in names}
    vital = {pid: name for name, pid in nodes.items()}
    _connect(plan, list(nodes.values()))
    if plan.delay:
        vital[_start_delay(plan.delay, list(nodes.values()))] = "the process that delays packets"
    vital.update(dict.fromkeys(_disturb(plan, nodes), "a process that disturbs"))
    if plan.measure:
        _measure(nodes["node0"], nodes["node1"])
    if not plan.command:
        return 0
    made_by = shlex.join(sys.argv[1 : -len(plan.command)]).removesuffix(" --")
    environment = {
        **launchers.environment(plan, SHARED, caller),
        "TMPDIR": SCRATCH,
        "TREEATTN_EMULATED": made_by,
    }
    command = subprocess.Popen(_on_node(nodes["node0"], *_words(plan, folder)), env=environment)
    return _wait(command.pid, vital)


def _words(plan: Plan, folder: str) -> list[str]:
    """The command, from the caller's folder: entering a node's mounts leads to the root folder."""
    go = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", folder]
    if plan.yield_cores:
        libraries = f"{SHARED}/{SLEEPER}.so {os.environ.get('LD_PRELOAD', '')}"
        go += ["env", f"LD_PRELOAD={libraries.strip()}"]
    return [*go, *plan.command]


def _write_files(plan: Plan, names: list[str]) -> None:
    hosts = [f"{SUBNET}.{index + 1} {name}" for index, name in enumerate(names)]
    files = {"hosts": "\n".join(["127.0.0.1 localhost", *hosts, ""]), **launchers.host_files(plan)}
    for name, text in files.items():
        Path(MEMORY, name).write_text(text)
    # Launchers split the path of their remote shell at spaces; the checkout's may have some.
    shutil.copy(HERE / "remote_shell", MEMORY)
    kernel.bind(f"{MEMORY}/hosts", "/etc/hosts")
    if plan.yield_cores:
        library, source = f"{MEMORY}/{SLEEPER}.so", HERE / f"{SLEEPER}.c"
        tools.run(
            "cc", "-O2", "-shared", "-fPIC", "-o", library, source, otherwise="--yield could not be compiled"
        )


def _start_node(name: str) -> int:
    """Fork a process that is the node; its PID, when the node is there."""
    ready, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()  # no signal from the terminal may end a node before the cluster ends
        try:
            _become_node(name)
        except OSError as error:
            os.write(report, str(error).encode())
            os._exit(1)
        os.write(report, b"ready")
        while True:
            signal.pause()
    os.close(report)
    said = os.read(ready, 1000).decode()
    os.close(ready)
    if said != "ready":
        raise Refusal(f"{name} could not be made: {said or 'its process ended'}")
    Path(MEMORY, f"{name}.pid").write_text(f"{pid}\n")
    return pid


def _become_node(name: str) -> None:
    kernel.isolate(kernel.NEW_MOUNT | kernel.NEW_NETWORK | kernel.NEW_UTS | kernel.NEW_IPC)
    socket.sethostname(name)
    with _kept(MEMORY) as shared:
        kernel.mount("tmpfs", MEMORY, "mode=1777")
        os.mkdir(SHARED)
        kernel.bind(shared, SHARED)
    os.mkdir(SCRATCH)
    os.chmod(SCRATCH, 0o1777)
    with _kept(CONTROL_GROUPS) as groups:
        kernel.mount("sysfs", "/sys")  # shows the network devices of this node
        if os.path.isdir(CONTROL_GROUPS):
            kernel.bind(groups, CONTROL_GROUPS, below=True)
    # Only IPv4 is delayed; and bbr, the default of some machines, paces by itself.
    network = Path("/proc/sys/net")
    if (network / "ipv6").exists():
        (network / "ipv6/conf/all/disable_ipv6").write_text("1")
    (network / "ipv4/tcp_congestion_control").write_text("reno")


@contextlib.contextmanager
def _kept(folder: str) -> Iterator[str]:
    """A path that leads to what is in `folder` now, while other things are mounted over it."""
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _on_node(pid: int, *words: object) -> list[str]:
    """The command that runs `words` on the node of process `pid`."""
    enter = ["nsenter", "--target", str(pid), "--net", "--uts", "--ipc", "--mount"]
    return [*enter, *map(str, words)]


def _connect(plan: Plan, nodes: list[int]) -> None:
    """One bridge in this namespace; each node's eth0 is the far end of one of its ports."""
    tools.run("ip", "link", "set", "lo", "up", otherwise=NO_BRIDGE)
    tools.run("ip", "link", "add", "switch", "type", "bridge", "forward_delay", 0, otherwise=NO_BRIDGE)
    tools.run("ip", "link", "set", "switch", "up", otherwise=NO_BRIDGE)
    for index, pid in enumerate(nodes):
        port, address = f"port{index}", f"{SUBNET}.{index + 1}/24"
        ends = ("type", "veth", "peer", "name", "eth0", "netns", pid)
        tools.run("ip", "link", "add", port, "master", "switch", *ends, otherwise=NO_BRIDGE)
        tools.run("ip", "link", "set", port, "up", otherwise=NO_BRIDGE)
        for words in (
            ("link", "set", "lo", "up"),
            ("address", "add", address, "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            tools.run(*_on_node(pid, "ip", *words), otherwise=NO_BRIDGE)
        if plan.bandwidth is not None:
            _shape(plan.bandwidth, port, pid)


def _shape(bandwidth: int, port: str, pid: int) -> None:
    """Limit both directions of a node's link to `bandwidth` in bit/s."""
    at_once = round(bandwidth / 8 * TIMER)
    segment = min(max(LEAST_SEGMENT, at_once // 2), MOST_SEGMENT)
    # The shaper counts the headers of every packet that a segment becomes: below a sixteenth of it.
    burst = max(at_once, segment + segment // 16 + 2048)
    limits = ("tbf", "rate", f"{bandwidth}bit", "burst", f"{burst}b", "limit", "16mb")
    tools.run("tc", "qdisc", "add", "dev", port, "root", *limits, otherwise=NO_SHAPING)
    for words in (
        ("ip", "link", "set", "eth0", "gso_max_size", segment),
        ("tc", "qdisc", "add", "dev", "eth0", "root", *limits),
    ):
        tools.run(*_on_node(pid, *words), otherwise=NO_SHAPING)


def _start_delay(delay: int, nodes: Iterable[int]) -> int:
    """Start the process that holds packets back, and send what arrives at each node to it."""
    for pid in nodes:
        _queue_arrivals(pid)
    return _start([sys.executable, HERE / "packet_delay.py", delay, *nodes], NO_QUEUE)


def _queue_arrivals(pid: int) -> None:
    rule = ("-t", "raw", "-A", "PREROUTING", "-i", "eth0", "-j", "NFQUEUE", "--queue-num", 0)
    *others, last = tools.iptables()
    for program in others:
        with contextlib.suppress(Refusal):  # this back end is not in the kernel
            return tools.run(*_on_node(pid, program, *rule), otherwise=NO_QUEUE)
    return tools.run(*_on_node(pid, last, *rule), otherwise=NO_QUEUE)


def _start(words: Iterable[object], otherwise: str) -> int:
    """Start a process of the cluster that says `ready`; its PID."""
    command = [str(word) for word in words]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stdout.readline() != b"ready\n":
        said = (process.stderr.read().decode().strip() or "it ended silently").splitlines()[-1]
        raise Refusal(f"{tools.explained(said, otherwise)} ({said})")
    return process.pid


def _disturb(plan: Plan, nodes: dict[str, int]) -> Iterator[int]:
    """Start what interrupts cores, and what others send from each node."""
    program = [sys.executable, HERE / "disturbance.py"]
    if plan.noise is not None:
        for core in sorted(os.sched_getaffinity(0)):
            yield _start([*program, "noise", *plan.noise, core], "the cores cannot be interrupted")
    if plan.traffic is not None and plan.bandwidth is not None:
        for name, pid in nodes.items():
            others = [other for other in nodes if other != name]
            words = [*program, "traffic", *plan.traffic, plan.bandwidth / 8, *others]
            yield _start(_on_node(pid, *words), f"others cannot send from {name}")


def _measure(near: int, far: int) -> None:
    probe = HERE / "link_probe.py"
    failed = "the link between node0 and node1 could not be measured"
    _start(list(_on_node(far, sys.executable, probe, "serve")), failed)
    done = subprocess.run(_on_node(near, sys.executable, probe, "measure", "node1"), check=False)
    if done.returncode != 0:
        raise Refusal(failed)


def _wait(command: int, vital: dict[int, str]) -> int:
    """Exit code of process `command`; meanwhile reap whatever else ends, as PID 1 must."""
    while True:
        pid, status = os.wait()
        if pid == command:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if pid in vital:
            raise Refusal(f"{vital[pid]} ended before the command did: the cluster is of no use without it")
