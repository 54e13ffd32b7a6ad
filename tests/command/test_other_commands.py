"""The commands that need no job: schemes, schedule, roofline, doctor, paper, tune, plot, check-partials."""

import importlib
import re
import sys
import xml.etree.ElementTree as ElementTree
from unittest import mock

import click
import numpy as np
import pytest

from treeattn import cli, collectives, files, schemes
from treeattn.cli import doctor
from treeattn.errors import BackendError
from treeattn.mpi import library
from treeattn.study.paper import EXPERIMENTS

from .launch import CACHE, ROOT, in_process, mpiexec, run, treeattn


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
    assert [row["name"] for row in done.facts] == schemes()
    for name in schemes():
        assert name in done.stdout


def test_schedule_in_every_format(tmp_path):
    words = ("schedule", "hierarchical", "--ranks", 10, "--nodes", "4+4+2", "--json", tmp_path / "facts.json")
    done = {form: in_process(*words, "--format", form) for form in ("text", "svg", "html", "json", "goal")}
    made = {form: one.stdout for form, one in done.items()}
    assert ElementTree.fromstring(made["svg"]).tag.endswith("svg")
    wanted = collectives.build("hierarchical:nodes=4+4+2", 10)
    assert collectives.Schedule.from_json(made["json"]) == wanted
    assert made["goal"].startswith("num_ranks 10")
    for form in ("text", "html"):
        assert wanted.name in made[form]
    facts = done["goal"].facts
    assert facts["certificate"]["determinism"] == "A"
    assert facts["certificate"]["rounds"] == len(facts["schedule"]["rounds"]) == len(wanted.rounds)


def test_roofline_reports_what_programs_read(tmp_path):
    words = ("roofline", "--tokens", "1k", "--groups", 2, "--dtypes", "float16", "--repeat", 1, "--json")
    beside = treeattn(*words, tmp_path / "r.json", ranks=2, code=2)
    assert "start it without mpiexec" in beside.stderr
    assert not list(tmp_path.iterdir())
    measured = in_process(*words, tmp_path / "r.json").facts
    (row,) = measured["rows"]
    assert measured["read_rate_gb_s"] > 0
    assert (row["dtype"], row["group"], row["tokens"], row["threads"]) == ("float16", 2, 1000, 1)
    assert row["gb_s"] > 0
    assert row["percent_of_read_rate"] > 0


def test_doctor_finds_a_working_machine(tmp_path):
    done = treeattn("doctor", "--json", tmp_path / "findings.json", code=None)
    findings = {finding["subject"]: finding for finding in done.facts}
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
    said = "no MPI library could be loaded (No module named 'mpi4py'): pip install mpich"
    monkeypatch.setattr(library, "load", mock.Mock(side_effect=BackendError(said)))
    monkeypatch.setattr(doctor.environment, "installed_version", {"torch": torch}.get)
    found = {finding.subject: finding.verdict for finding in doctor._findings()}
    assert found["MPI library"] == verdict
    assert found["torchrun"] == ("ok" if torch else "missing")


def test_doctor_names_the_remedy_for_a_missing_compiler(tmp_path):
    done = treeattn("doctor", CC="no-such-compiler", TREEATTN_CACHE=str(tmp_path))
    assert "slow" in done.stdout
    assert "install a C compiler" in done.stdout


def test_the_paper_beside_its_model(tmp_path):
    done = in_process("paper", "--wide", "--json", tmp_path / "p.json")
    words = ("close to 8", "3,845", "1,040", "dgx-h100, simulated")
    for word in (*words, "what is not explained: docs/paper.md"):
        assert word in done.stdout
    assert [entry["name"] for entry in done.facts["experiments"]] == list(EXPERIMENTS)


def test_one_experiment():
    done = in_process("paper", "volume")
    assert "volume:" in done.stdout
    assert "latency:" not in done.stdout


def test_the_winner_is_proved_drawn_simulated_and_run(tmp_path):
    own, facts = tmp_path / "own.json", tmp_path / "facts.json"
    words = ("--cluster", "dual-4090", "--ranks", 2)
    in_process("tune", *words)
    done = in_process("tune", "--cluster", "leonardo", "--ranks", 4, "--out", own, "--json", facts)
    assert "candidates; shown is what none beats" in done.stdout
    fastest = min(row["microseconds"] for row in done.facts["rows"])
    assert in_process("schedule", own).stdout.startswith("tuned@")
    done = in_process("simulate", "--cluster", "leonardo", "--ranks", 4, "--schemes", own, "--json", facts)
    assert done.facts["rows"][0]["microseconds"] == pytest.approx(fastest)
    done = treeattn("decode", CACHE, "--scheme", own, "--check", "--repeat", 1, ranks=4)
    assert "tuned@" in done.stdout


def test_the_name_to_pass_is_the_fastest_that_has_one(tmp_path):
    facts = tmp_path / "facts.json"
    words = ("--cluster", "pcie-islands", "--ranks", 8, "--placement", "cyclic")
    done = in_process("tune", *words, "--json", facts)
    found = done.facts
    times = {row["schedule"]: row["microseconds"] for row in found["rows"]}
    name = found["scheme"]
    alike = [one for one in found["rows"] if one["estimate"]["ratio_low"] <= 1 and not one["on_the_front"]]
    others = sum(not one["on_the_front"] for one in found["rows"])
    assert f"; of {others} others {len(alike)} cannot be told apart from it" in done.said
    assert f"--scheme '{name}'" in done.stdout
    assert times[name] == min(time for text, time in times.items() if "," not in text)
    done = in_process("simulate", *words, "--schemes", name, "--json", facts)
    assert done.facts["rows"][0]["microseconds"] == pytest.approx(times[name])


RESULTS = ROOT / "tests" / "data" / "compare.jsonl"


def test_files_of_every_figure_that_there_is(tmp_path):
    out = tmp_path / "out"
    done = in_process("plot", RESULTS, "--out", out, "--format", "svg,pdf", "--json", tmp_path / "n.json")
    made = sorted(path.name for path in out.iterdir())
    assert made == ["relative.pdf", "relative.svg", "time.pdf", "time.svg"]
    assert sorted(done.stdout.splitlines()) == [str(out / name) for name in made]
    assert done.stderr.endswith("not in these results: scaling, predicted\n")  # above it perhaps progress
    assert {one["ratio_low"] for one in done.facts if one["label"] == one["baseline"]} == {None}
    assert {"label", "time_us", "low_us", "ratio", "verdict"} <= done.facts[0].keys()
    assert "recursive_doubling" in (out / "time.svg").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--figures", "predicted"), "not in these results: predicted"),
     (("--figures", "time,scaling", "--format", "svg"), "not in these results: scaling")],
)  # fmt: skip
def test_a_figure_asked_for_by_name_is_missed(tmp_path, words, said):
    assert said in in_process("plot", RESULTS, *words, "--out", tmp_path, code=1).stderr
    assert (tmp_path / "time.svg").exists() == ("time,scaling" in words)


@pytest.mark.parametrize(
    "words", ["plot matplotlib", "plot pandas", "plot scipy.stats", "report jinja2", "report matplotlib"]
)
def test_without_the_extra(tmp_path, monkeypatch, words):
    command, module = words.split()
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "treeattn.study.figures", raising=False)
    done = in_process(command, RESULTS, "--out", tmp_path / "out", code=1)
    said = done.stderr.splitlines()[-1]  # above it perhaps progress
    assert said.startswith(f"treeattn: {module.partition('.')[0]} is missing (")
    assert done.stderr.endswith("): pip install '.[study]'\n")
    assert not (tmp_path / "out").exists()


@pytest.fixture(params=["npz", "safetensors"])
def written(request, tmp_path):
    """Dumps of three ranks, the whole that a merge in base e makes of them, and one that base 2 makes."""
    draw = np.random.default_rng(0)
    out, lse = draw.standard_normal((3, 4, 8)).astype(np.float32), draw.standard_normal((3, 4)) * 4

    def write(name, **arrays):
        path = tmp_path / f"{name}.{request.param}"
        if request.param == "npz":
            np.savez(path, **arrays)
        else:
            path.write_bytes(files.save_tensors(arrays, {}))
        return path

    paths = [write(f"rank{rank}", out=out[rank], lse=lse[rank].astype(np.float32)) for rank in range(3)]
    for base in ("e", "2"):
        weight = np.exp(lse * {"e": 1.0, "2": np.log(2)}[base])[..., None]
        write(f"base_{base}", out=((weight * out).sum(0) / weight.sum(0)).astype(np.float32))
    return tmp_path, request.param, paths


def test_verdicts(written):
    folder, kind, paths = written
    words = ("check-partials", *paths, "--json", folder / "f.json", "--whole")
    done = in_process(*words, folder / f"base_e.{kind}")
    assert (done.stdout, done.stderr) == ("no fault in 3 parts and the whole\n", "")
    assert done.facts["findings"] == []
    done = in_process(*words, folder / f"base_2.{kind}", code=1)
    assert "fault: wrong base: reading lse of every rank in base 2 makes the out of the whole" in done.stdout
    (finding,) = done.facts["findings"]
    assert (finding["kind"], finding["ranks"]) == ("wrong base", [0, 1, 2])
    in_process(*words, folder / f"base_2.{kind}", "--base", "2")


def test_without_a_whole_it_says_what_one_would_tell(written):
    _, _, paths = written
    done = in_process("check-partials", paths[0], paths[1], paths[1], code=1)
    assert "fault: counted twice: ranks 1 and 2 hold the same part" in done.stdout
    done = in_process("check-partials", *paths)
    assert done.stdout == "no fault in 3 parts: with --whole FILE a wrong merge is found, too\n"
