"""Compiles the C kernels with the system's compiler for the processor that runs them, and keeps the result.

The instruction set is part of a compiled file's name and comes from explicit flags, never from
``-march=native``: machines of different kinds can share a home directory.

Environment, each read here and nowhere else:

- ``CC``: the compiler, with arguments if need be; default ``cc``.
- ``TREEATTN_CACHE``: where compiled kernels are kept; default
  ``$XDG_CACHE_HOME/treeattn``, else ``~/.cache/treeattn``, else a private folder among the temporary files.
- ``TREEATTN_ISA``: use this instruction set, one of `ISA_FLAGS` that the processor has.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from treeattn.backends import kernel_folder
from treeattn.errors import ArgumentError, BackendError

#: Compiler flags of each instruction set, the fastest first.
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "neon": (),
    "portable": (),
}

# Contraction is off so that only the explicit fmaf of the sources are fused: see the merge. Loops begin
# lines: one of five instructions that lies in two lines reads memory at three quarters of the rate.
_FLAGS = (
    *("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-falign-loops=64"),
    *("-fPIC", "-shared", "-pthread"),
)
# What the functions that Python calls return, where that is not an int.
_RESULTS = {
    "partial_attention attention_workspace decode_step run_step launch_step": ctypes.c_int64,
    "merge_partials finish merge_bins finish_bins multiply_rows rescale_records": None,
    "mpi_operator": ctypes.c_void_p,
}


@functools.cache
def available_isas() -> tuple[str, ...]:
    """Names from `ISA_FLAGS` that this processor can run, the fastest first."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return ("neon", "portable")
    if machine not in ("x86_64", "amd64"):
        return ("portable",)
    features = _x86_features()
    names = {name: {flag.removeprefix("-m") for flag in flags} for name, flags in ISA_FLAGS.items()}
    return tuple(name for name in ("avx512", "avx2", "portable") if names[name] <= features)


def chosen_isa() -> str:
    """The instruction set in use: ``TREEATTN_ISA``, else the fastest that the processor has. Raises
    `ArgumentError` where that names none, or one that this processor lacks."""
    available = available_isas()
    wanted = os.environ.get("TREEATTN_ISA", "")
    if not wanted:
        return available[0]
    if wanted not in available:
        raise ArgumentError(f"TREEATTN_ISA={wanted}: this processor can run {', '.join(available)}")
    return wanted


def compiled_kernels_problem() -> str | None:
    """Why the compiled kernels cannot be used here, in one line; None where they can.

    Everything here works without them, several times slower and without a warning: the caller
    knows whether to say so, and once for all ranks. Raises `ArgumentError` where ``TREEATTN_ISA`` asks for
    what this processor lacks, or ``TREEATTN_CACHE`` cannot be written.
    """
    return loaded()[1]


def loaded() -> tuple[ctypes.CDLL | None, str | None]:
    """The compiled kernels, or why there are none."""
    return _load(chosen_isa())


@functools.cache
def _load(isa: str) -> tuple[ctypes.CDLL | None, str | None]:
    try:
        kernels = library(isa)
    except BackendError as error:
        return None, str(error)
    for names, result in _RESULTS.items():
        for name in names.split():
            getattr(kernels, name).restype = result
    return kernels, None


@functools.cache
def library(isa: str) -> ctypes.CDLL:
    """The kernels compiled for an instruction set, now if they never were.

    Raises `BackendError` where there is no compiler, it refuses the sources, or what it made cannot be
    loaded, `ArgumentError` where ``TREEATTN_CACHE`` cannot be written.
    """
    path = library_path(isa)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(
            f"the compiled kernels {path} cannot be loaded: {error}; delete the file, "
            "or set TREEATTN_CACHE to a folder from which programs may run"
        ) from error


def library_path(isa: str) -> Path:
    """The file with the kernels for one instruction set, compiled now if it is not there.

    One process of a machine compiles while the others wait. The file appears whole or not at all. Where there
    is no compiler, as on the compute nodes of some clusters, what another machine with the same cache folder
    compiled from the same sources serves too.
    """
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        raise BackendError(f"CC={os.environ['CC']} cannot be read as a command: {error}") from None
    files = sorted(file for file in kernel_folder("cpu").iterdir() if file.suffix in (".c", ".h"))
    sources, flags = {file.name: file.read_bytes() for file in files}, (*_FLAGS, *ISA_FLAGS[isa])
    stem = (
        f"kernels-{isa}-{_digest(platform.machine(), platform.system(), *flags, *sources, *sources.values())}"
    )
    folder = _chosen_folder()
    try:
        version = _run([*compiler, "--version"])
    except BackendError:
        built = sorted(folder.glob(f"{stem}-*.so"))
        if not built:
            raise
        return built[0]
    name = f"{stem}-{_digest(*compiler, version)}.so"
    if not os.path.exists(folder / name):  # False, too, where this user may not look
        folder = _writable(folder)
        with _alone(folder):
            if not os.path.exists(folder / name):
                inputs = [str(file) for file in files if file.suffix == ".c"]
                _compile([*compiler, *flags, *inputs, "-lm"], folder / name)
    return folder / name


def measured(isa: str, known: Sequence[str], measure: Callable[[], str]) -> str:
    """Which of the `known` words `measure` says of this processor with these kernels. It is kept beside them,
    by the processor's model, if it can be. One process of a machine measures while the others wait."""
    model = _digest(*map(_processor, ("model name", "CPU implementer", "CPU part")))
    library = library_path(isa)
    path = library.with_name(f"{library.stem}-{model}.measured")

    def kept() -> str | None:
        with contextlib.suppress(OSError):
            if (text := path.read_text(encoding="utf-8", errors="replace")) in known:
                return text
        return None  # or of another version, or damaged

    if found := kept():
        return found
    with _alone(path.parent):
        if found := kept():
            return found
        found = measure()
        with contextlib.suppress(OSError):
            unfinished = path.with_name(f"{path.name}-{platform.node()}-{os.getpid()}")
            unfinished.write_text(found, encoding="utf-8")
            unfinished.replace(path)
    return found


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While other processes of this machine wait to be alone there, too."""
    with contextlib.ExitStack() as stack:  # its end gives the lock back
        with contextlib.suppress(OSError):  # without working locks several do the same work: harmless
            lock = stack.enter_context((folder / f"compiling-on-{platform.node()}.lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(content) + content)
    return digest.hexdigest()[:16]


def _compile(command: list[str], path: Path) -> None:
    # What is unfinished lies on the same file system, where a rename is atomic, and is on the disc by then.
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        _run([*command, "-o", str(unfinished)])
        unfinished.chmod(0o755)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)


def _run(command: list[str]) -> str:
    """Standard output of a compiler command; BackendError with its first complaint if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BackendError(f"no C compiler: {command[0]}: {error.strerror or error}") from error
    if result.returncode == 0:
        return result.stdout
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    complaint = next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")
    raise BackendError(f"{command[0]} failed with status {result.returncode}: {complaint.strip()}")


def _chosen_folder() -> Path:
    """Where the environment wants compiled kernels; it need not exist. Code is loaded from it: not from one
    that everybody can fill."""
    chosen = os.environ.get("TREEATTN_CACHE")
    if chosen and _open_to_all(Path(chosen)):
        raise ArgumentError(
            f"TREEATTN_CACHE={chosen}: everybody can write it, or a folder that it is in: chmod o-w, or take "
            "one of your own"
        )
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "treeattn"
    except RuntimeError:  # no home directory
        return _private_temporary_folder()
    if _open_to_all(folder) or (os.path.exists(folder) and not _of_this_user_alone(folder.stat())):
        return _private_temporary_folder()
    return folder


def _of_this_user_alone(status: os.stat_result) -> bool:
    """Whether it is a folder of this user's in which no other user can put files."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _open_to_all(folder: Path) -> bool:
    """Whether anybody can put files there, or another folder in its place. In one such as /tmp, whose sticky
    bit protects what lies there, it has to be this user's, or root's."""
    held: os.stat_result | None = None
    for place in (folder.resolve(), *folder.resolve().parents):
        try:
            status = place.stat()
        except OSError:  # not there yet
            continue
        protected = status.st_mode & stat.S_ISVTX and place != folder.resolve()
        if status.st_mode & stat.S_IWOTH and not (
            protected and (held is None or held.st_uid in (os.getuid(), 0))
        ):
            return True
        held = status
    return False


def _writable(folder: Path) -> Path:
    """The chosen folder, created if need be; a private one if the default cannot be written."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # whatever the umask leaves to a group
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        if os.environ.get("TREEATTN_CACHE"):  # a wish that cannot be met is an error, not a hint
            raise ArgumentError(f"TREEATTN_CACHE={folder} cannot be written: {error}") from error
        return _private_temporary_folder()


def _private_temporary_folder() -> Path:
    """A folder that no other user can write: code is loaded from it."""
    folder = Path(tempfile.gettempdir()) / f"treeattn-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        private = _of_this_user_alone(folder.lstat())
        return folder if private else Path(tempfile.mkdtemp(prefix="treeattn-"))
    except OSError as error:
        raise BackendError(f"no place for compiled kernels: {error}; set TREEATTN_CACHE") from error


def _x86_features() -> set[str]:
    """Processor features as the -m flags name them, from Linux; empty where it cannot be read."""
    return set(_processor("flags").split())


@functools.cache
def _processor(field: str) -> str:
    """What Linux says of the first processor; empty where it says nothing."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == field), "")
