"""What compilers make for the tests, kept by the hash of everything that goes into it.

The folder lies in the checkout: `make clean` removes it, and a CI service may keep it from run to run.
"""

import fcntl
import functools
import hashlib
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "tests"


def kept(suffix: str, ingredients: tuple[str | bytes, ...], make: Callable[[Path], object]) -> Path:
    """The file that `make` writes from `ingredients`, written now if it was not kept.

    Processes that want the same file wait for the first of them; the file appears whole or not at all.
    """
    digest = hashlib.sha256()
    for part in ingredients:
        content = part.encode() if isinstance(part, str) else part
        digest.update(f"{len(content)} ".encode() + content)
    file = FOLDER / f"{digest.hexdigest()[:24]}{suffix}"
    if file.exists():
        return file
    FOLDER.mkdir(parents=True, exist_ok=True)
    # A lock for each first digit: few files, and most builds go on side by side.
    with (FOLDER / f"lock-{file.name[0]}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
                unfinished = Path(folder) / file.name
                make(unfinished)
                unfinished.replace(file)
    return file


def built(suffix: str, command: list[str], *ingredients: str | bytes, stdin: str = "") -> Path:
    """The same, written by `command` with ``-o FILE`` at its end. The hash takes in command and compiler.

    Raises:
        subprocess.CalledProcessError: with what the compiler said in `stderr`.
    """

    def compile(file: Path) -> None:
        subprocess.run([*command, "-o", str(file)], input=stdin, capture_output=True, text=True, check=True)

    return kept(suffix, (_version(command[0]), "\0".join(command), stdin, *ingredients), compile)


@functools.cache
def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
