"""Hooks of pytest on ranks that torchrun has started: rank 0 reports, and what fails on one fails on all."""

import datetime
import os
import shutil
import tempfile

import pytest
import torch.distributed as dist

from tests.support.fake_nccl import connected_by
from tests.support.torchrun import without_mpi
from treeattn.mpi import communicators

_LIMIT = datetime.timedelta(seconds=float(os.environ.get("TREEATTN_TEST_DEADLINE", "120")))
dist.init_process_group("gloo", timeout=_LIMIT)
_OUTCOMES = dist.new_group(timeout=_LIMIT)  # never shared with the code under test


@pytest.fixture
def comm():
    """All ranks: one object for all tests, which a loop of one's own leaves to its thread."""
    ranks = communicators.intracomm(None)
    ranks.owner.let_go()
    return ranks


@pytest.fixture
def several(comm):
    """Marks what one rank cannot do."""
    if comm.size == 1:
        pytest.skip("one rank is not several")


class NcclOverTorch:
    """What `collectives.runtime.nccl.connect` gives, made of gloo's messages between emulated GPUs."""

    def __init__(self, comm, runtime):
        self.rank, self.size = comm.rank, comm.size
        self._comm, self._runtime = comm.dup(), runtime

    def exchange(self, receives, sends):
        ways = (dist.irecv, receives), (dist.isend, sends)
        inside = self._runtime.inside
        posts = [
            self._comm.operation(call, inside(array), peer, 0) for call, of in ways for array, peer in of
        ]
        self._runtime.queue(lambda: [work.wait() for work in dist.batch_isend_irecv(posts)])

    def check(self):
        """gloo raises where something breaks."""

    def close(self):
        self._comm.free()

    abort = close


@pytest.fixture
def nccl_communicators(monkeypatch):
    return connected_by(monkeypatch, NcclOverTorch)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """A temporary folder for each rank."""
    config.option.basetemp = tempfile.mkdtemp(prefix=f"treeattn-rank{dist.get_rank()}-")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.addinivalue_line("markers", "mpi: inside a job of several ranks")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if dist.get_rank() and reporter:
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 - for the session


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when != "call":
        return
    failures = [""] * dist.get_world_size()
    dist.all_gather_object(failures, str(report.longrepr) if report.failed else "", group=_OUTCOMES)
    if any(failures):
        report.outcome = "failed"
        report.longrepr = "\n".join(f"---- rank {rank}\n{text}" for rank, text in enumerate(failures) if text)


def pytest_sessionfinish():
    without_mpi()


def pytest_unconfigure(config):
    shutil.rmtree(config.option.basetemp, ignore_errors=True)
    dist.barrier(_OUTCOMES)
    dist.destroy_process_group()
