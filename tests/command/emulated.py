"""The ``treeattn`` command on a machine whose ranks have emulated GPUs: python emulated.py WORDS.."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from emulator.runtime import EmulatorRuntime  # noqa: E402

from treeattn.backends.cuda import cupy_runtime  # noqa: E402
from treeattn.cli import main  # noqa: E402

GPUS = int(os.environ.get("EMULATED_GPUS", "8"))
runtime = EmulatorRuntime()


def choose(index: int) -> None:
    runtime.identity = f"0000:{index % GPUS:02X}:00.0"


cupy_runtime.current = lambda: runtime  # type: ignore[assignment,return-value]
cupy_runtime.choose = choose
main(sys.argv[1:])
