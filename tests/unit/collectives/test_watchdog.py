"""Waits end: the limit, what polls, what is left behind, and who is told apart from who only works."""

import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from unittest import mock

import pytest

from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.process import Process
from treeattn.collectives.runtime.reducer import Reducer
from treeattn.errors import ArgumentError


@pytest.mark.parametrize(("text", "seconds"), [("", 600), ("12.5", 12.5), ("0", math.inf), ("1e3", 1000)])
def test_the_limit_is_a_number_of_seconds(monkeypatch, text, seconds):
    monkeypatch.setenv(watchdog.VARIABLE, text)
    assert watchdog.limit() == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "1e300", "5s"])
def test_another_setting_is_refused(monkeypatch, text):
    monkeypatch.setenv(watchdog.VARIABLE, text)
    with pytest.raises(ArgumentError, match=f"TREEATTN_TIMEOUT={text}: give a number of seconds, 0 for no"):
        watchdog.limit()


def test_polling_ends_with_what_is_waited_for_or_at_the_limit():
    left = iter([False, False, True])
    assert watchdog.poll(lambda: next(left), math.inf)
    looks = []
    assert not watchdog.poll(lambda: False, 0.02, lambda: looks.append(1))
    assert looks


def test_a_call_that_does_not_return_is_left_behind():
    never = threading.Event()
    assert not watchdog.call_with_timeout(0.02, never.wait)
    never.set()
    assert watchdog.call_with_timeout(60, never.wait)
    assert watchdog.call_with_timeout(math.inf, never.wait)
    with pytest.raises(ZeroDivisionError):
        watchdog.call_with_timeout(60, lambda: 1 / 0)


class Steps(Reducer):
    """Asks who is late while it is in a step."""

    def __init__(self, looks):
        self.seen = weakref.WeakKeyDictionary()
        self.looks = looks
        super().__init__("steps")

    def _begin(self):
        self.late = [watchdog._stalled(self.seen) for _ in range(self.looks)]

    _complete = _release = lambda self: None


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """No other test's things, and no thread."""
    monkeypatch.setattr(watchdog, "_things", weakref.WeakSet())
    monkeypatch.setattr(watchdog, "_thread", [None])


def test_one_step_that_is_found_again_and_again_is_late():
    steps = Steps(looks=6)
    steps()
    assert steps.late == [None] * 4 + [("steps", "the other ranks")] * 2


def test_time_between_start_and_wait_is_the_callers():
    steps = Steps(looks=3)
    steps.start()
    assert [watchdog._stalled(steps.seen) for _ in range(9)] == [None] * 9
    steps.wait()


def test_a_step_that_failed_waits_no_more():
    steps = Steps(looks=0)
    steps._complete = mock.Mock(side_effect=RuntimeError)
    with pytest.raises(RuntimeError):
        steps()
    assert [watchdog._stalled(steps.seen) for _ in range(9)] == [None] * 9


def test_a_call_of_all_ranks_is_looked_at_while_it_lasts():
    seen = weakref.WeakKeyDictionary()
    with watchdog.Guarded("planning", "rank 7"):
        assert [watchdog._stalled(seen) for _ in range(5)][-1] == ("planning", "rank 7")
    assert watchdog._stalled(seen) is None


@pytest.fixture
def peer(monkeypatch):
    """A process that stands for rank 1 of 3, whose rank 2 is on another machine."""
    monkeypatch.setattr(watchdog, "_jobs", [])
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = {1: Process.of(process.pid)}
    watchdog.introduce(0, 3, lambda: known)
    yield process
    process.kill()
    process.communicate()


def test_a_message_names_the_rank_that_is_stopped_or_has_ended(peer):
    def said():
        return watchdog.timeout_message("planning", "the other ranks", 8)

    assert "without the other ranks, which hang, made other calls" in said()
    assert "; 2 ranks cannot be looked up from here; if steps" in said()
    os.kill(peer.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, peer.pid, os.WSTOPPED | os.WNOWAIT)
    assert f"8 s without the other ranks: rank 1 is stopped (process {peer.pid}); if" in said()
    peer.kill()
    os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)
    assert f"8 s without the other ranks: rank 1 has ended (process {peer.pid}); if" in said()


def test_the_patient_wait_as_long_as_every_rank_runs(peer):
    seen = weakref.WeakKeyDictionary()
    with watchdog.Guarded("between measurements", patient=True):
        assert [watchdog._stalled(seen) for _ in range(9)] == [None] * 9
        os.kill(peer.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, peer.pid, os.WSTOPPED | os.WNOWAIT)
        late = [watchdog._stalled(seen) for _ in range(5)]
    assert late == [None] * 4 + [("between measurements", "the other ranks")]


def test_a_process_runs_is_stopped_runs_again_and_has_ended():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process, states = Process.of(child.pid), []
    states.append(process.state)
    for number, event in ((signal.SIGSTOP, os.WSTOPPED), (signal.SIGCONT, os.WCONTINUED)):
        os.kill(child.pid, number)
        os.waitid(os.P_PID, child.pid, event | os.WNOWAIT)
        states.append(process.state)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    states.append(process.state)
    child.wait()
    assert Process.of(child.pid).state == "ended"  # of a number that is nobody's
    assert [*states, process.state] == ["running", "stopped", "running", "ended", "ended"]


def test_a_number_that_is_used_again_is_another_process():
    here = Process.of(os.getpid())
    assert here.state == "running"
    assert here._replace(started="1").state == "ended"
