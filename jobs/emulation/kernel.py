"""The system calls that Python 3.10 has no function for. Each raises `OSError` that names the call."""

from __future__ import annotations

import ctypes
import os

__all__ = [
    "bind",
    "enter_network",
    "isolate",
    "keep_mounts_private",
    "mount",
    "punctual_timers",
    "signal_at_parents_end",
]

# clone(2), mount(2) and prctl(2); the same numbers on every architecture.
NEW_MOUNT, NEW_UTS, NEW_IPC, NEW_PID, NEW_NETWORK = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
BIND, RECURSIVE, PRIVATE = 1 << 12, 1 << 14, 1 << 18
SET_PARENT_DEATH_SIGNAL = 1
SET_TIMER_SLACK = 29

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def isolate(namespaces: int) -> None:
    """Leave the given namespaces for new ones (`NEW_PID`: for the children to come)."""
    _call("unshare", namespaces)


def enter_network(pid: int | str) -> None:
    """Move into the network namespace of process `pid`."""
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        _call("setns", namespace.fileno(), NEW_NETWORK)


def mount(kind: str, target: str, options: str = "") -> None:
    """A new file system of this kind on `target`."""
    _call("mount", kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(0), options.encode())


def bind(source: str, target: str, below: bool = False) -> None:
    """Let `target` show what is at `source`; with `below`, also what is mounted on and below it."""
    flags = BIND | RECURSIVE if below else BIND
    _call("mount", source.encode(), target.encode(), None, ctypes.c_ulong(flags), None)


def keep_mounts_private() -> None:
    """What is mounted from now on stays in this mount namespace."""
    _call("mount", b"none", b"/", None, ctypes.c_ulong(RECURSIVE | PRIVATE), None)


def signal_at_parents_end(number: int) -> None:
    """This process gets signal `number` when its parent ends, in whatever way."""
    _call("prctl", SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(number), 0, 0, 0)


def punctual_timers() -> None:
    """Wake at the nanosecond asked for; the kernel's default groups wake-ups within 50 microseconds."""
    _call("prctl", SET_TIMER_SLACK, ctypes.c_ulong(1), 0, 0, 0)
