"""Compiling at first use: once per machine, whole or not at all, and a reason where it cannot be."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.drawn import sample
from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.collectives import build
from treeattn.errors import ArgumentError, BackendError

COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler `cc`")

# In a process of its own, a source that compiles at once.
SEVEN = (
    "from treeattn.backends.cpu import compile\n"
    "compile._sources = lambda: {'seven.c': b'int seven(void) { return 7; }'}\n"
)
LOAD = SEVEN + "print(compile.library_path('portable'))"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TREEATTN_CACHE", str(folder))
    return folder


@pytest.fixture
def tiny(monkeypatch):
    """A source that compiles at once, for tests that load nothing."""
    monkeypatch.setattr(compile, "_sources", lambda: {"tiny.c": b"int tiny;\n", "tiny.h": b""})


@pytest.fixture
def as_cc(tmp_path, monkeypatch):
    """Makes a shell script the compiler."""

    def as_cc(text):
        script = tmp_path / "made-cc"
        script.write_text(f"#!/bin/sh\n{text}")
        script.chmod(0o755)
        monkeypatch.setenv("CC", str(script))
        return script

    return as_cc


@pytest.fixture
def counting_compiler(tmp_path, as_cc):
    """A `cc` that notes each compilation in a file and takes its time; returns that file."""
    log = tmp_path / "compilations"
    log.touch()
    as_cc(f'case "$*" in *--version*) ;; *) echo once >> {log}; sleep 0.5;; esac\nexec {COMPILER} "$@" -O0\n')
    return log


def said(code):
    """What a process of its own prints."""
    out, error = python(code).communicate(timeout=300)
    assert not error
    return out.strip()


def python(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip


@needs_compiler
def test_processes_that_start_together_compile_once(cache, counting_compiler):
    processes = [python(LOAD) for _ in range(4)]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert len({out for out, _ in outputs}) == 1
    assert counting_compiler.read_text().count("once") == 1
    assert Path(outputs[0][0].strip()).parent == cache


@needs_compiler
@pytest.mark.usefixtures("tiny")
def test_the_file_is_found_again(cache, counting_compiler):
    first = compile.library_path("portable")
    assert compile.library_path("portable") == first
    assert counting_compiler.read_text().count("once") == 1
    assert [file.name for file in cache.glob("*.so")] == [first.name]
    assert not list(cache.glob("*.tmp"))


@needs_compiler
def test_a_compiler_that_dies_half_way_leaves_nothing(cache, as_cc):
    # Writes half a file to what follows -o, then fails: the disc is full, or a signal came.
    as_cc(
        f'case "$*" in *--version*) exec {COMPILER} --version;; esac\n'
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && printf "\\177ELF half" > "$2"; shift; done\n'
        'echo "kernels.c:1: error: no space left" >&2\nexit 3\n'
    )
    with pytest.raises(BackendError, match="no space left"):
        compile.library_path("portable")
    assert not list(cache.glob("*.so"))
    assert not list(cache.glob("*.tmp"))


def truncated(content):
    return content[: len(content) // 2]


def emptied(content):
    return b""


def of_another_processor(content):
    return content[:18] + b"\xf3\x00" + content[20:]  # e_machine of the ELF header: RISC-V


def with_one_wrong_bit(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@needs_compiler
@pytest.mark.parametrize("damage", sample(2, [truncated, emptied, of_another_processor, with_one_wrong_bit]))
def test_a_damaged_file_is_compiled_anew_once(cache, counting_compiler, damage):
    code = SEVEN + "print(compile.library('portable').seven())"
    assert said(code) == "7"
    (path,) = cache.glob("*.so")
    path.write_bytes(damage(path.read_bytes()))
    processes = [python(code) for _ in range(3)]
    assert [process.communicate(timeout=300) for process in processes] == [("7\n", "")] * 3
    assert counting_compiler.read_text().count("once") == 2
    assert list(cache.glob("*.so")) == [path]


@needs_compiler
@pytest.mark.usefixtures("cache", "tiny")
def test_a_whole_file_that_cannot_be_loaded_is_an_error(monkeypatch):
    def refuse(name):
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(compile.ctypes, "CDLL", refuse)
    with pytest.raises(BackendError, match="cannot be loaded: failed to map.*TREEATTN_CACHE"):
        compile.library.__wrapped__("portable")


@needs_compiler
def test_a_killed_process_leaves_no_file_that_is_used(cache, counting_compiler):
    die = "compile.os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)\n"
    process = python(f"import os, signal\n{SEVEN}{die}{LOAD}")
    process.communicate(timeout=300)
    assert process.returncode == -9
    assert len(list(cache.glob("*.tmp"))) == 1
    assert not list(cache.glob("*.so"))
    again = said(LOAD)
    assert list(cache.glob("*.so")) == [Path(again)]
    assert counting_compiler.read_text().count("once") == 2


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
    process = python(code, CC=compiler)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0
    assert error == ""
    problem, values = out.splitlines()
    assert problem != "None"
    assert "compiler" in problem or "failed" in problem
    assert ("bad" in compiler) == ("x.c:1: error: bad" in problem)
    assert values == "8.0 9.0 10.0 11.0 12.0 13.0 14.0 15.0"


@needs_compiler
@pytest.mark.usefixtures("tiny")
def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("TREEATTN_CACHE", str(blocker / "cache"))  # below a file: not even root can
    with pytest.raises(ArgumentError, match="TREEATTN_CACHE=.*cannot be written"):
        compile.library_path("portable")
    monkeypatch.delenv("TREEATTN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    monkeypatch.setattr(compile.tempfile, "gettempdir", lambda: str(tmp_path))
    path = compile.library_path("portable")
    assert path.parent == tmp_path / f"treeattn-{os.getuid()}"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert compile.library_path("portable") == path


@needs_compiler
@pytest.mark.usefixtures("tiny")
def test_machines_without_a_compiler_use_what_others_compiled(cache, monkeypatch):
    path = compile.library_path("portable")
    monkeypatch.setenv("CC", "/nonexistent/cc")
    assert compile.library_path("portable") == path
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(BackendError, match="no C compiler: /nonexistent/cc"):
        compile.library_path("portable")
    path.write_bytes(whole)
    monkeypatch.setattr(compile, "_sources", lambda: {"other.c": b"int other;"})
    with pytest.raises(BackendError, match="no C compiler: /nonexistent/cc"):
        compile.library_path("portable")
    assert list(cache.glob("*.so")) == [path]


@needs_compiler
@pytest.mark.usefixtures("tiny")
def test_a_full_cache_need_not_be_writable(cache, monkeypatch):
    path = compile.library_path("portable")

    def refuse(**_):
        raise PermissionError("read-only")

    monkeypatch.setattr(compile.tempfile, "TemporaryFile", refuse)
    version = compile.subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True).stdout
    monkeypatch.setattr(compile, "_run", lambda command: version if "--version" in command else 1 / 0)
    assert compile.library_path("portable") == path
    assert path.parent == cache


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
    assert compile._private_temporary_folder().parent == tmp_path
    assert compile._private_temporary_folder() != tmp_path / "treeattn-12345"


def test_a_cache_folder_that_everybody_can_write_is_not_trusted(tmp_path, monkeypatch):
    folder = tmp_path / "treeattn"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("TREEATTN_CACHE", str(folder))
    with pytest.raises(ArgumentError, match="everybody can write it.*chmod o-w"):
        compile.library_path("portable")
    monkeypatch.delenv("TREEATTN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile.tempfile, "tempdir", str(tmp_path))
    assert compile._chosen_folder() == tmp_path / f"treeattn-{os.getuid()}"


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
    """Unless the user names it: a group's, or somebody else's."""
    monkeypatch.delenv("TREEATTN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile.tempfile, "tempdir", str(tmp_path / "private"))
    (tmp_path / "private").mkdir()
    folder = tmp_path / "treeattn"
    mask = os.umask(0o002)
    try:
        assert compile._writable_folder() == folder
    finally:
        os.umask(mask)
    assert compile._chosen_folder() == folder
    folder.chmod(0o775)
    assert compile._chosen_folder().parent == tmp_path / "private"
    folder.chmod(0o755)
    monkeypatch.setattr(compile.os, "getuid", lambda: 12345)  # whom it does not belong to
    assert compile._chosen_folder().parent == tmp_path / "private"
    monkeypatch.setenv("TREEATTN_CACHE", str(folder))
    assert compile._chosen_folder() == folder


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("TREEATTN_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert compile._writable_folder() == tmp_path / "home" / ".cache" / "treeattn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compile._writable_folder() == tmp_path / "xdg" / "treeattn"
    monkeypatch.setenv("TREEATTN_CACHE", str(tmp_path / "own"))
    assert compile._writable_folder() == tmp_path / "own"


def test_planning_many_merges_asks_for_the_processor_once(monkeypatch):
    """And still follows the environment from one merge to the next."""
    reads = []
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **how: reads.append(path) or read_text(path, **how))
    compile._x86_features.cache_clear()
    operator, records = cpu.MergeOperator(8), np.zeros((2, 64, 10), np.float32)
    schedule = build("recursive_doubling", 64)
    merges = [operator.planned_merge(*records) for round_ in schedule.rounds for _ in round_]
    assert len(merges) == 64 * 6
    assert reads.count(Path("/proc/cpuinfo")) <= 1
    monkeypatch.setenv("TREEATTN_ISA", "no such")
    with pytest.raises(ArgumentError, match="TREEATTN_ISA=no such"):
        operator.planned_merge(*records)


@needs_compiler
@pytest.mark.usefixtures("cache", "tiny")
def test_builds_differ_by_isa_compiler_and_source(monkeypatch):
    paths = {compile.library_path(isa) for isa in compile.available_isas()}
    monkeypatch.setenv("CC", "cc -DOTHER")
    paths.add(compile.library_path("portable"))
    monkeypatch.delenv("CC")
    sources = {**compile._sources(), "more.c": b"int more_to_link;\n"}
    monkeypatch.setattr(compile, "_sources", lambda: sources)
    paths.add(compile.library_path("portable"))
    assert len(paths) == len(compile.available_isas()) + 2


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", {"sse2"}, ("portable",)),
        ("x86_64", {"avx2", "fma"}, ("portable",)),
        ("x86_64", {"avx2", "fma", "f16c", "avx512f"}, ("avx2", "portable")),
        (
            "x86_64",
            {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
            ("avx512", "avx2", "portable"),
        ),
        ("aarch64", set(), ("neon", "portable")),
        ("riscv64", set(), ("portable",)),
    ],
)
def test_the_instruction_set_is_one_that_the_processor_has(monkeypatch, machine, features, expected):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(compile, "_x86_features", lambda: features)
    monkeypatch.delenv("TREEATTN_ISA", raising=False)
    assert compile.available_isas() == expected
    assert compile.chosen_isa() == expected[0]
    monkeypatch.setenv("TREEATTN_ISA", "portable")
    assert compile.chosen_isa() == "portable"
    for refused in {"neon", "avx512", "fast"} - set(expected):
        monkeypatch.setenv("TREEATTN_ISA", refused)
        with pytest.raises(ArgumentError, match=f"{refused}.*portable"):
            compile.chosen_isa()
