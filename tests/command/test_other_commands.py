"""The commands that need no job: schemes, schedule, roofline, doctor."""

import importlib
import json
import re
import xml.etree.ElementTree as ElementTree

import click
import pytest

from treeattn import cli, collectives, schemes
from treeattn.cli import doctor
from treeattn.errors import BackendError
from treeattn.mpi import library

from .launch import ROOT, in_process, mpiexec, run, treeattn


def test_help_lists_each_command_with_its_whole_sentence():
    done = treeattn("--help")
    listed = done.stdout.partition("Commands:\n")[2]
    entries = re.split(r"^  (?=[a-z])", listed, flags=re.MULTILINE)[1:]
    names = [entry.split()[0] for entry in entries]
    known = """
        cache-node calibrate check-partials compare decode doctor generate paper
        plot report roofline schedule schemes simulate tune verify
    """
    assert names == known.split()
    for entry in entries:
        assert entry.rstrip().endswith(".")
        assert "..." not in entry


def test_the_list_of_commands_is_that_of_their_modules():
    """With the first paragraph of each one's own help."""
    modules = {path.stem.replace("_", "-") for path in (ROOT / "treeattn/cli").glob("*.py")}
    context = click.Context(cli.commands)
    found = {}
    for name in modules - {"--init--"}:
        command = getattr(importlib.import_module(f"treeattn.cli.{name.replace('-', '_')}"), "command", None)
        if isinstance(command, click.Command):
            found[name] = " ".join(command.help.partition("\n\n")[0].split())
    assert found == {name: cli._COMMANDS[name] for name in cli.commands.list_commands(context)}


@pytest.mark.parametrize(
    ("typed", "found"),
    [("sch", ["schedule", "schemes"]), ("schedule --form", ["--format"]), ("schedule --format h", ["html"])],
)
def test_shells_complete_what_is_typed(typed, found):
    asked = {"COMP_WORDS": f"treeattn {typed}", "COMP_CWORD": str(len(typed.split()))}
    done = run("-m", "treeattn", _TREEATTN_COMPLETE="bash_complete", **asked)
    assert [line.partition(",")[2] for line in done.stdout.splitlines()] == found


def test_without_a_command_it_says_which_there_are():
    done = treeattn(code=2)
    assert done.stderr.startswith("Usage: treeattn")
    assert "doctor" in done.stderr


def test_schemes_lists_the_catalogue(tmp_path):
    done = in_process("schemes", "--json", tmp_path / "catalogue.json")
    rows = json.loads((tmp_path / "catalogue.json").read_text())
    assert [row["name"] for row in rows] == schemes()
    for name in schemes():
        assert name in done.stdout


def test_schedule_in_every_format(tmp_path):
    words = ("schedule", "hierarchical", "--ranks", 10, "--nodes", "4+4+2", "--json", tmp_path / "facts.json")
    made = {
        form: in_process(*words, "--format", form).stdout for form in ("text", "svg", "html", "json", "goal")
    }
    assert ElementTree.fromstring(made["svg"]).tag.endswith("svg")
    wanted = collectives.build("hierarchical:nodes=4+4+2", 10)
    assert collectives.Schedule.from_json(made["json"]) == wanted
    assert made["goal"].startswith("num_ranks 10")
    for form in ("text", "html"):
        assert wanted.name in made[form]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["certificate"]["determinism"] == "A"
    assert facts["certificate"]["rounds"] == len(facts["schedule"]["rounds"]) == len(wanted.rounds)


def test_roofline_reports_what_programs_read(tmp_path):
    words = ("roofline", "--tokens", "1k", "--groups", 2, "--dtypes", "float16", "--repeat", 1, "--json")
    beside = treeattn(*words, tmp_path / "r.json", ranks=2, code=2)
    assert "start it without mpiexec" in beside.stderr
    assert not list(tmp_path.iterdir())
    in_process(*words, tmp_path / "r.json")
    measured = json.loads((tmp_path / "r.json").read_text())
    (row,) = measured["rows"]
    assert measured["read_rate_gb_s"] > 0
    assert (row["dtype"], row["group"], row["tokens"], row["threads"]) == ("float16", 2, 1000, 1)
    assert row["gb_s"] > 0
    assert row["percent_of_read_rate"] > 0


def test_doctor_finds_a_working_machine(tmp_path):
    done = treeattn("doctor", "--json", tmp_path / "findings.json", code=None)
    findings = {
        finding["subject"]: finding for finding in json.loads((tmp_path / "findings.json").read_text())
    }
    assert findings["MPI library"]["verdict"] == "ok"
    assert {"NVIDIA driver", "CuPy", "NCCL", "CUDA-aware MPI"} <= findings.keys()
    if mpiexec():
        assert done.returncode == 0, done.stdout
        assert findings["launcher"]["verdict"] == "ok"


@pytest.mark.parametrize(
    "words",
    [
        "schemes",
        pytest.param("paper", marks=pytest.mark.deep),
        "doctor",
        "roofline --tokens 1k --groups 1 --dtypes float32 --repeat 1",
        "--help",
    ],
)
def test_what_is_printed_fits_80_columns(words):
    done = in_process(*words.split())
    assert 40 < max(map(len, done.stdout.splitlines())) <= 80


def test_every_column_on_request():
    narrow, every = in_process("schemes"), in_process("schemes", "--wide")
    assert "proved" in narrow.stdout
    assert "time (p ranks, n bytes)" in every.stdout
    assert "time (p ranks, n bytes)" not in narrow.stdout


@pytest.mark.deep
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec")
def test_a_long_job_says_how_far_it_is():
    words = ("compare", "--schemes", "ring", "--bytes", 4096, "--repetitions", 400)
    done = run("-m", "treeattn", *words, ranks=2)
    assert re.search(r"^reduce \S+: \d+ of 800 blocks are done, at most \d+ s are left$", done.stderr, re.M)


OPEN_MPI = """#!/bin/sh
[ "$OMPI_ALLOW_RUN_AS_ROOT$OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" = 11 ] || exit 1
echo 2
echo 2
"""


@pytest.mark.parametrize("told", [False, True])
def test_doctor_says_what_open_mpi_wants_of_root(tmp_path, monkeypatch, told):
    launcher = tmp_path / "mpiexec"
    launcher.write_text(OPEN_MPI)
    launcher.chmod(0o755)
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 0)
    monkeypatch.setattr(doctor, "_started", lambda: doctor.Finding("this job", "ok", "one process"))
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(library, "version", lambda: "Open MPI v5.0.7")
    monkeypatch.setattr(doctor, "launcher", lambda: str(launcher))
    for name in doctor.AS_ROOT:
        monkeypatch.setenv(name, "1") if told else monkeypatch.delenv(name, raising=False)
    found = {finding.subject: finding for finding in doctor._mpi(False, together=False)}["launcher"]
    assert found.verdict == "ok"
    export = "it refuses root: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    assert found.remedy == ("" if told else export)


@pytest.mark.parametrize(("torch", "verdict"), [("2.13.0", "missing"), (None, "broken")])
def test_doctor_without_mpi4py_needs_another_launcher(monkeypatch, torch, verdict):
    def load():
        raise BackendError("no MPI library could be loaded (No module named 'mpi4py'): pip install mpich")

    monkeypatch.setattr(library, "load", load)
    monkeypatch.setattr(doctor.environment, "installed_version", {"torch": torch}.get)
    found = {finding.subject: finding.verdict for finding in doctor._findings()}
    assert found["MPI library"] == verdict
    assert found["torchrun"] == ("ok" if torch else "missing")


def test_doctor_names_the_remedy_for_a_missing_compiler(tmp_path):
    done = treeattn("doctor", CC="no-such-compiler", TREEATTN_CACHE=str(tmp_path))
    assert "slow" in done.stdout
    assert "install a C compiler" in done.stdout
