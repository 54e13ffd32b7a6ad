"""Which targets outside the gate passed with the files as they are, and makes those that are due.

Usage: python tools/passed.py TARGET               exit code 0 where TARGET passed with these files
       python tools/passed.py --note TARGET BEGIN  notes that it did, unless a file changed since
       python tools/passed.py --due SECONDS        makes what is due while time is left, and names the others
The record is committed: for each target a hash of what it depends on, by name and content, and its seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "passed.json"
LINKS = ("treeattn/collectives", "treeattn/kernels")

# The package without what no target reaches: a room that comes or moves is in it, without a word here.
PACKAGE = ("treeattn", "collectives", "kernels/cpu", "!treeattn/energy")
SHARED = ("tests/conftest.py", "tests/support")  # of tests
MODELS = (*PACKAGE, "!treeattn/cli", "!treeattn/llama", "!treeattn/study")
EMULATOR = ("kernels/cuda", "tests/emulator")  # of GPUs
#: Target -> the files and folders it depends on, and, after "!", what of these it does not.
TARGETS = {
    "test-kernels": ("kernels", "tests/emulator/cuda_on_cpu"),
    "slurm-test": (*PACKAGE, *SHARED, "jobs", "tests/slurm", "tests/cluster/programs"),
    "test-cluster": (*PACKAGE, *SHARED, "jobs", "tests/cluster", *EMULATOR),
    "cluster-demo": (*PACKAGE, "jobs"),
    "test-models": (*MODELS, *SHARED, "tests/huggingface", "tests/mpi/conftest.py", *EMULATOR),
    "hf-demo": (*PACKAGE, "tools/hf_demo.py", "tools/convert_gguf.py"),
    "faults": (*PACKAGE, *SHARED, "tests/faults", "tests/command"),
}
CHOOSE = (
    "CLUSTER_JOB",
    "DEVICE",
    "PYTEST_ADDOPTS",
)  # variables of the environment that say what a target does
PATIENCE = 60  # seconds that a target has for its end
EMULATED = ("slurm-test", "test-cluster", "cluster-demo")  # whose links iptables delays


def files(target: str) -> Iterator[Path]:
    """What a target depends on, in order."""
    without = {ROOT / name[1:] for name in TARGETS[target] if name.startswith("!")}
    without |= {ROOT / name for name in LINKS}
    tops = [ROOT / name for name in TARGETS[target] if not name.startswith("!")]
    for path in sorted({path for top in tops for path in (top, *top.rglob("*"))}):
        if path.is_file() and "__pycache__" not in path.parts and without.isdisjoint((path, *path.parents)):
            yield path


def digest(target: str) -> str:
    """Of every file by name and content."""
    found = hashlib.sha256()
    for path in files(target):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def record() -> dict[str, dict[str, Any]]:
    """Target -> hash and seconds of the last time that it was noted."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def passed(target: str) -> bool:
    """Whether the record is that of these files."""
    return record().get(target, {}).get("hash") == digest(target)


def lacks(target: str) -> str:
    """What this machine lacks to make TARGET whole, in words; empty where nothing."""
    if target in (*EMULATED, "faults") and os.geteuid():
        return "root"
    return "iptables" if target in EMULATED and not shutil.which("iptables") else ""


def note(target: str, begin: int) -> str:
    """Write the record; what came of it, in a sentence."""
    if lack := lacks(target):
        return f"{target} is not noted: without {lack} it skips what it tests"
    if chosen := [name for name in CHOOSE if os.environ.get(name)]:
        return f"{target} is not noted: {', '.join(chosen)} may have left out what it tests"
    changed = [str(path.relative_to(ROOT)) for path in files(target) if int(path.stat().st_mtime) > begin]
    if changed:
        return f"{target} is not noted: changed since it began: {', '.join(changed[:5])}"
    noted = record() | {target: {"hash": digest(target), "seconds": int(time.time()) - begin}}
    RECORD.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n")
    return f"{target} is noted in tests/{RECORD.name}: commit it"


def make_due(seconds: float) -> int:
    """The quickest first, as far as they are known; the exit code."""
    begin, took = time.monotonic(), {name: entry["seconds"] for name, entry in record().items()}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    failed, lines = 0, []
    due = [target for target in TARGETS if not passed(target)]
    for target in sorted(due, key=lambda target: took.get(target, math.inf)):
        left = int(begin + seconds - time.monotonic())
        if lack := lacks(target):
            lines.append(f"left: {target}, which needs {lack}")
        elif left < max(1, took.get(target, 0)):
            lines.append(f"left: {target}, {max(0, left)} s remain of {seconds:.0f}")
        else:
            words = ("timeout", "-k", str(PATIENCE), str(left), "make", "-s", target)
            started = time.monotonic()
            code = subprocess.run(words, cwd=ROOT, env=environment).returncode
            if code and time.monotonic() - started >= left:  # 124, or -9 where it had to be killed
                lines.append(f"left: {target}, not done within {left} s")
            else:
                failed |= code != 0
                lines.append(f"{'FAILED' if code else 'passed'}: {target}")
    print("", *lines, sep="\n")
    return int(failed)


def main(words: list[str]) -> int:
    """The exit code."""
    if len(words) == 3 and words[0] == "--note":
        print(note(words[1], int(words[2])))
        return 0
    if len(words) == 2 and words[0] == "--due":
        return make_due(float(words[1]))
    done = passed(words[0])
    print(f"{words[0]} has {'' if done else 'not '}passed with these files ({RECORD.name})")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
