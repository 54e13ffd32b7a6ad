"""Ranks that are started once and run one command after another, each as if it had been started for it.

The start of a rank takes more time than most commands do. Between two commands ranks wait in a read, which
takes no processor.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn
from unittest import mock


class Ranks:
    """A job, which takes command lines until one of them ends it."""

    def __init__(
        self, launcher: Sequence[str], size: int, root: Path, environment: Mapping[str, str]
    ) -> None:
        self._folder, self._size = Path(tempfile.mkdtemp(prefix="treeattn-ranks-")), size
        for name in ("replies", *map(str, range(size))):
            os.mkfifo(self._folder / name)
        self._log = (self._folder / "log").open("w+")
        self._process = subprocess.Popen(
            [*launcher, sys.executable, "-m", "tests.command.waiting_ranks", str(self._folder)], cwd=root,
            env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip
        # For reading and writing: neither opening nor reading waits for who has not come, or finds an end.
        self._replies = os.open(self._folder / "replies", os.O_RDWR)
        self._requests = [os.open(self._folder / str(rank), os.O_RDWR) for rank in range(size)]
        atexit.register(self.close)

    def run(self, command: Command, settings: Mapping[str, str], limit: float) -> tuple[int, str, str]:
        """Exit code, output and errors. settings: environment variables for this command alone."""
        request = json.dumps([command, _settings() | settings]) + "\n"
        for rank, pipe in enumerate(self._requests):
            for name in "out", "err":
                (self._folder / f"{name}{rank}").write_bytes(b"")
            rest = request.encode()
            while rest:
                rest = rest[os.write(pipe, rest) :]
        codes, began = b"", time.monotonic()
        while codes.count(b"\n") < self._size and self._process.poll() is None:
            if time.monotonic() - began > limit:
                self.close()
                raise AssertionError(f"still running after {limit} s: {command.words}\n{self._said('err')}")
            if select.select([self._replies], [], [], 0.05)[0]:
                codes += os.read(self._replies, 1 << 16)
        code = self._process.returncode or max(map(int, codes.split()), default=0)
        told = self._said("out"), self._said("err")
        if self._process.returncode is not None:
            self._log.seek(0)
            told = told[0], told[1] + self._log.read()
            self.close()
        return code, *told

    def ended(self) -> bool:
        return self._process.returncode is not None

    def _said(self, name: str) -> str:
        return "".join((self._folder / f"{name}{rank}").read_text() for rank in range(self._size))

    def close(self) -> None:
        if self._folder.exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._replies, *self._requests):
                os.close(pipe)
            self._log.close()
            shutil.rmtree(self._folder)


_kept: dict[object, Ranks] = {}


def run(
    launcher: Sequence[str],
    size: int,
    command: Command,
    environment: Mapping[str, str],
    limit: float,
    root: Path,
) -> tuple[int, str, str]:
    """As `Ranks.run`, on as many ranks as the launcher starts."""
    settings = {name: value for name, value in environment.items() if name.startswith(SETTINGS)}
    own = dict(environment.items() - settings.items())
    which = (*launcher, *own.items(), command.emulated)
    if which not in _kept or _kept[which].ended():
        _kept[which] = Ranks(launcher, size, root, own)
    try:
        return _kept[which].run(command, settings, limit)
    finally:
        if _kept[which].ended():
            del _kept[which]


#: Environment variables that are read anew by each command.
SETTINGS = ("TREEATTN_", "EMULATED_", "NCCL_")


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}


@contextlib.contextmanager
def brief(words: Sequence[str]) -> Iterator[None]:
    """`compare` measures the fewest iterations of each block: nobody asks here how long they take."""
    with contextlib.ExitStack() as stack:
        if list(words[:1]) == ["compare"]:
            stack.enter_context(mock.patch("treeattn.cli.compare.SECONDS", 0.0))
            stack.enter_context(mock.patch("treeattn.study.compare.measure.ENOUGH", 0))
        yield


class Command(NamedTuple):
    """Words of the ``treeattn`` command. patches: a program before it, whose `patch` is that of
    `mock.patch.object`; what it changes is as it was afterwards. emulated: on a machine with GPUs."""

    words: Sequence[str]
    patches: str = ""
    emulated: bool = False

    def __call__(self) -> NoReturn:
        from treeattn import cli

        sys.argv[:] = ["treeattn", *self.words]
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())  # what was said before is said again
            stack.enter_context(brief(self.words))
            if self.emulated:
                from tests.command import emulated

                stack.enter_context(emulated.gpus())
            exec(self.patches, {"patch": lambda *given: stack.enter_context(mock.patch.object(*given))})
            cli.main(self.words)


def main() -> None:
    """One rank: commands come by the pipe with its number."""
    from treeattn.mpi import job, launch

    folder, (rank, size) = Path(sys.argv[1]), launch.launched_as()
    if size > 1:
        job.start()
    screen = sys.stdout
    reply = functools.partial(os.write, os.open(folder / "replies", os.O_WRONLY))
    with (folder / str(rank)).open() as requests:
        for request in requests:
            command, settings = json.loads(request)
            for name in _settings():
                del os.environ[name]
            os.environ |= settings
            for number, name in ((1, "out"), (2, "err")):
                file = os.open(folder / f"{name}{rank}", os.O_WRONLY)
                os.dup2(file, number)
                os.close(file)
            code: object = 1
            try:
                Command(*command)()
            except SystemExit as left:
                code = left.code
            except BaseException:
                traceback.print_exc()
            sys.stdout = screen
            sys.stdout.flush()
            sys.stderr.flush()
            reply(f"{code if isinstance(code, int) else 0 if code is None else 1}\n".encode())


if __name__ == "__main__":
    main()
