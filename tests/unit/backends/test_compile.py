"""Compiling at first use: once per machine, whole or not at all, and a reason where it cannot be."""

import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.collectives import build
from treeattn.errors import ArgumentError, BackendError

COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler `cc`")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TREEATTN_CACHE", str(folder))
    return folder


@pytest.fixture
def seven(tmp_path, monkeypatch):
    """In place of the kernels a source that compiles at once; returns its folder."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "seven.c").write_text("int seven(void) { return 7; }\n")
    monkeypatch.setattr(compile, "kernel_folder", lambda language: folder)
    return folder


@pytest.fixture
def path(seven):
    """Gives the compiled file."""
    return lambda isa="portable": compile.library_path(isa)


@pytest.fixture
def start(seven):
    """Starts a process that compiles or loads that source, as words say before and after."""

    def start(*, before="", after="print(compile.library_path('portable'))"):
        code = "import os, signal\nfrom pathlib import Path\nfrom treeattn.backends.cpu import compile\n"
        code += f"{before}\ncompile.kernel_folder = lambda language: Path({str(seven)!r})\n{after}"
        return python(code)

    return start


def python(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip


@pytest.fixture
def as_cc(tmp_path, monkeypatch):
    """Makes a shell script the compiler."""

    def as_cc(text):
        script = tmp_path / "made-cc"
        script.write_text(f"#!/bin/sh\n{text}")
        script.chmod(0o755)
        monkeypatch.setenv("CC", str(script))

    return as_cc


@pytest.fixture
def compilations(tmp_path, as_cc):
    """How often a `cc` was called that takes its time."""
    log = tmp_path / "compilations"
    log.touch()
    as_cc(f'case "$*" in *--version*) ;; *) echo once >> {log}; sleep 0.5;; esac\nexec {COMPILER} "$@" -O0\n')
    return lambda: log.read_text().count("once")


@needs_compiler
@pytest.mark.slow
def test_processes_that_start_together_compile_once(cache, path, start, compilations):
    """The file is found again, and nothing lies beside it."""
    processes = [start(after="print(compile.library('portable').seven())") for _ in range(4)]
    assert [process.communicate(timeout=300) for process in processes] == [("7\n", "")] * 4
    assert [cache / path().name] == list(cache.glob("*.so")) == [path()]
    assert compilations() == 1
    assert not list(cache.glob("unfinished-*"))


@needs_compiler
def test_a_compiler_that_dies_half_way_leaves_nothing(cache, path, as_cc):
    # Writes half a file to what follows -o, then fails: the disc is full, or a signal came.
    as_cc(
        f'case "$*" in *--version*) exec {COMPILER} --version;; esac\n'
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && printf "\\177ELF half" > "$2"; shift; done\n'
        'echo "kernels.c:1: error: no space left" >&2\nexit 3\n'
    )
    with pytest.raises(BackendError, match="no space left"):
        path()
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


@needs_compiler
def test_a_killed_process_leaves_no_file_that_is_used(cache, start, compilations):
    process = start(before="Path.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate(timeout=300)
    assert process.returncode == -9
    assert not list(cache.glob("*.so"))
    again, error = start().communicate(timeout=300)
    assert not error
    assert list(cache.glob("*.so")) == [Path(again.strip())]
    assert compilations() == 2


@needs_compiler
@pytest.mark.parametrize("content", [b"", b"\x7fELF half", b"no library"])
@pytest.mark.usefixtures("cache")
def test_a_file_that_cannot_be_loaded_is_an_error(path, content):
    path().write_bytes(content)
    with pytest.raises(BackendError, match="cannot be loaded: .*; delete the file.*TREEATTN_CACHE"):
        compile.library.__wrapped__("portable")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "compiler", ["/nonexistent/cc", "false", "sh -c 'echo x.c:1: error: bad >&2; exit 1'"]
)
def test_without_a_compiler_numpy_serves(compiler):
    code = (
        "import numpy as np\nfrom treeattn.backends import cpu\n"
        "print(cpu.compiled_kernels_problem())\n"
        "q = np.ones((1, 1, 1, 8), np.float32); k = np.zeros((1, 3, 1, 8), np.float32)\n"
        "v = np.arange(24, dtype=np.float32).reshape(1, 3, 1, 8)\n"
        "r = np.empty((1, 1, 1, 10), np.float32); out = np.empty_like(q)\n"
        "lse = np.empty((1, 1, 1), np.float32)\n"
        "cpu.PlannedAttention(r, scale=1.0)(q, k, v); cpu.planned_finish(r, out, lse)()\n"
        "print(*out.ravel())"
    )
    out, error = python(code, CC=compiler).communicate(timeout=300)
    assert error == ""
    problem, values = out.splitlines()
    assert (
        "x.c:1: error: bad" if "bad" in compiler else "compiler" if "/" in compiler else "failed"
    ) in problem
    assert values == "8.0 9.0 10.0 11.0 12.0 13.0 14.0 15.0"


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path, path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.touch()
    for folder in blocker / "cache", tmp_path / ("x" * 300):  # not even root can write or look into these
        monkeypatch.setenv("TREEATTN_CACHE", str(folder))
        with pytest.raises(ArgumentError, match="TREEATTN_CACHE=.*cannot be written"):
            path()
    monkeypatch.delenv("TREEATTN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    monkeypatch.setattr(compile.tempfile, "gettempdir", lambda: str(tmp_path))
    assert path().parent == tmp_path / f"treeattn-{os.getuid()}"
    assert stat.S_IMODE(path().parent.stat().st_mode) == 0o700
    assert path() == path()


@needs_compiler
def test_what_others_compiled_serves_without_a_compiler_and_without_writing(cache, seven, path, monkeypatch):
    made, refuse = path(), mock.Mock(side_effect=PermissionError("read-only"))
    monkeypatch.setattr(compile.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(compile, "_compile", refuse)
    assert path() == made
    monkeypatch.setenv("CC", "/nonexistent/cc")
    assert path() == made
    (seven / "more.h").write_text("int other;")
    with pytest.raises(BackendError, match="no C compiler: /nonexistent/cc"):
        path()
    assert list(cache.glob("*.so")) == [made]


def test_a_temporary_folder_of_someone_else_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(compile.tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"treeattn-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert compile._private_temporary_folder() != folder
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert compile._private_temporary_folder() != folder
    folder.unlink()
    assert compile._private_temporary_folder() == folder
    monkeypatch.setattr(compile.os, "getuid", lambda: 12345)  # whom that folder does not belong to
    folder.rename(tmp_path / "treeattn-12345")
    assert compile._private_temporary_folder() != tmp_path / "treeattn-12345"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's folder")
def test_a_cache_folder_that_another_user_planted_is_not_trusted(tmp_path, monkeypatch):
    """In a folder such as /tmp, its own or one above it; and in one that lets everybody rename it."""
    shared = tmp_path / "shared"
    (shared / "planted" / "kernels").mkdir(parents=True)
    shared.chmod(0o1777)
    for folder, refused in ((shared / "planted" / "kernels", True), (shared / "new", False)):
        os.chown(shared / "planted", 12345, 12345)
        assert compile._open_to_all(folder) == refused
    os.chown(shared / "planted", 0, 0)
    assert not compile._open_to_all(shared / "planted" / "kernels")
    shared.chmod(0o777)
    assert compile._open_to_all(shared / "new")


def test_code_is_taken_from_no_folder_that_others_fill(tmp_path, monkeypatch):
    """A group's or somebody else's, unless the user names it; never from one that everybody can write."""
    monkeypatch.delenv("TREEATTN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile.tempfile, "tempdir", str(tmp_path / "private"))
    (tmp_path / "private").mkdir()
    folder, mask = tmp_path / "treeattn", os.umask(0o002)
    try:
        assert compile._writable(compile._chosen_folder()) == folder
    finally:
        os.umask(mask)
    assert compile._chosen_folder() == folder
    for mode, user in ((0o775, os.getuid()), (0o1777, os.getuid()), (0o755, 12345)):
        folder.chmod(mode)
        monkeypatch.setattr(compile.os, "getuid", lambda user=user: user)
        assert compile._chosen_folder().parent == tmp_path / "private"
    monkeypatch.setenv("TREEATTN_CACHE", str(folder))
    assert compile._chosen_folder() == folder
    folder.chmod(0o1777)
    with pytest.raises(ArgumentError, match="everybody can write it.*chmod o-w"):
        compile._chosen_folder()


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    for name in ("TREEATTN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compile._chosen_folder() == tmp_path / "home" / ".cache" / "treeattn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compile._chosen_folder() == tmp_path / "xdg" / "treeattn"
    monkeypatch.setenv("TREEATTN_CACHE", str(tmp_path / "own"))
    assert compile._chosen_folder() == tmp_path / "own"


def test_planning_many_merges_asks_for_the_processor_once(monkeypatch):
    """And still follows the environment from one merge to the next."""
    reads = []
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **how: reads.append(path) or read_text(path, **how))
    compile.available_isas.cache_clear()
    operator, records = cpu.MergeOperator(8), np.zeros((2, 64, 10), np.float32)
    schedule = build("recursive_doubling", 64)
    merges = [operator.planned_merge(*records) for round_ in schedule.rounds for _ in round_]
    assert len(merges) == 64 * 6
    assert reads.count(Path("/proc/cpuinfo")) <= 1
    monkeypatch.setenv("TREEATTN_ISA", "no such")
    with pytest.raises(ArgumentError, match="TREEATTN_ISA=no such"):
        operator.planned_merge(*records)


@needs_compiler
@pytest.mark.usefixtures("cache")
def test_builds_differ_by_isa_compiler_and_source(path, seven, monkeypatch):
    paths = {path(isa) for isa in compile.available_isas()}
    monkeypatch.setenv("CC", "cc -DOTHER")
    paths.add(path())
    monkeypatch.delenv("CC")
    (seven / "more.c").write_text("int more_to_link;\n")
    paths.add(path())
    assert len(paths) == len(compile.available_isas()) + 2


AVX2 = {"avx2", "fma", "f16c"}
AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", {"sse2"}, ("portable",)),
        ("x86_64", {"avx2", "fma"}, ("portable",)),
        ("x86_64", {*AVX2, "avx512f"}, ("avx2", "portable")),
        ("x86_64", AVX2 | AVX512, ("avx512", "avx2", "portable")),
        ("aarch64", set(), ("neon", "portable")),
        ("riscv64", set(), ("portable",)),
    ],
)
def test_the_instruction_set_is_one_that_the_processor_has(monkeypatch, machine, features, expected):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(compile, "_x86_features", lambda: features)
    monkeypatch.setattr(compile, "available_isas", compile.available_isas.__wrapped__)
    monkeypatch.delenv("TREEATTN_ISA", raising=False)
    assert compile.available_isas() == expected
    assert compile.chosen_isa() == expected[0]
    monkeypatch.setenv("TREEATTN_ISA", "portable")
    assert compile.chosen_isa() == "portable"
    for refused in {"neon", "avx512", "fast"} - set(expected):
        monkeypatch.setenv("TREEATTN_ISA", refused)
        with pytest.raises(ArgumentError, match=f"{refused}.*portable"):
            compile.chosen_isa()
