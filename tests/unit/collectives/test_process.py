"""What is known of other processes of this machine."""

import os
import signal
import subprocess
import sys

from treeattn.collectives.runtime.process import Process


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
