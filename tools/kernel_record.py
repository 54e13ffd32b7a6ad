"""Says whether the deep tests passed with these kernels; --write notes that they did.

The record is a hash of the kernels and of what executes them in the tests, committed with them.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "kernels.sha256"
SOURCES = ("kernels/cpu", "kernels/cuda", "tests/emulator/cuda_on_cpu")


def digest() -> str:
    """Of every source by name and content."""
    found = hashlib.sha256()
    for file in sorted(file for folder in SOURCES for file in (ROOT / folder).iterdir()):
        found.update(f"{file.relative_to(ROOT)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def main() -> int:
    """Exit code 0 where the record is that of these kernels."""
    if "--write" in sys.argv[1:]:
        RECORD.write_text(digest() + "\n")
    passed = RECORD.exists() and RECORD.read_text().strip() == digest()
    print(f"the kernels are {'' if passed else 'not '}those with which the deep tests passed ({RECORD.name})")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
