"""Processes and the machines that they run on, as /proc tells of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process: its number, and when it started in ticks since boot, since numbers are used again."""

    number: int
    started: str

    @classmethod
    def of(cls, number: int) -> Process:
        """The process that has this number now."""
        return cls(number, _status(number)[1])

    @property
    def state(self) -> str:
        """``running``, ``stopped`` (by a signal or a debugger) or ``ended``."""
        state, started = _status(self.number)
        if not started or started != self.started:
            return "ended"
        return "stopped" if state in ("T", "t") else "running"


def kernel() -> str:
    """What processes have in common if they run under the same kernel: its boot, else the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def namespace() -> str:
    """What processes have in common that know each other by the same numbers; empty where nothing tells."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _status(number: int) -> tuple[str, str]:
    """State as /proc/PID/stat has it, and start in ticks since boot; empty for a process that has ended."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return "", ""
    state, *fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return ("", "") if state in ("Z", "X") else (state, fields[18])
