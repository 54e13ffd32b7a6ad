"""The programs of the system that a cluster is built with, and what is said where one is missing or fails."""

from __future__ import annotations

import shutil
import subprocess

__all__ = ["Refusal", "explained", "iptables", "require", "run"]

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "iptables": "iptables",
    "cc": "gcc",
}
NO_RIGHTS = (
    "root lacks rights here (CAP_SYS_ADMIN, CAP_NET_ADMIN, CAP_SYS_NICE): a container must be privileged"
)


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
        raise Refusal(f"{explained(said, otherwise)} (`{' '.join(command)}`: {said})")


def explained(said: str, otherwise: str) -> str:
    """What a failure means: missing rights if the system said so, else `otherwise`."""
    return NO_RIGHTS if "not permitted" in said else otherwise


def iptables() -> list[str]:
    """The iptables to try in turn: the older back end needs less of a kernel, and new kernels lack it."""
    found = [shutil.which(name) for name in ("iptables-legacy", "iptables-nft", "iptables")]
    return [program for program in found if program]
