"""The programs of the system that a cluster is built with, and what is said where one is missing or fails."""

from __future__ import annotations

import shutil
import subprocess

__all__ = ["Refusal", "iptables", "require", "run"]

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "iptables": "iptables",
    "cc": "gcc",
}


class Refusal(Exception):
    """This machine cannot run the cluster that was asked for; the message says what to do."""


def require(names: list[str]) -> None:
    """Refuse if one of these programs is not installed."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        packages = sorted({PACKAGES[name] for name in missing})
        raise Refusal(
            f"{', '.join(missing)} not found: install {' '.join(packages)} (on Debian and Ubuntu: "
            f"apt install {' '.join(packages)})"
        )


def run(*words: object, otherwise: str) -> None:
    """Run a program that prints nothing when all is well; `otherwise` says what its failure means."""
    command = [str(word) for word in words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise Refusal(f"{otherwise} (`{' '.join(command)}`: {said})")


def iptables() -> str:
    """The iptables to use: the older back end if it is there, since it needs less of the kernel."""
    return shutil.which("iptables-legacy") or "iptables"
