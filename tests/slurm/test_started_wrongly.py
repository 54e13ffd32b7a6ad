"""Tasks of a real srun that do not find each other say so, and so does what runs beside the jobs."""

import json

import pytest

from .conftest import CACHE, MPIS

SRUN = ("srun", "--nodes=2", "--ntasks=4")


@pytest.mark.parametrize("plugin", ["none", "the other's"])
def test_srun_without_the_plug_in_of_the_mpi(slurm, plugin):
    own = slurm.environment["SLURM_MPI_TYPE"]
    if plugin != "none":
        (plugin,) = {kind for _, kind in MPIS.values()} - {own}
    done = slurm.command(*SRUN, f"--mpi={plugin}", "treeattn", "decode", CACHE, timeout=120)
    assert done.returncode != 0
    assert "pass" not in done.stdout
    if (own, plugin) != ("pmi2", "pmix"):  # where MPICH itself ends the job
        assert "srun --mpi=" in done.stderr


def this_job(slurm, *started):
    """The verdict of doctor on the job in which it runs, and its exit code."""
    found = slurm.folder / "found.json"
    done = slurm.command(*started, "treeattn", "doctor", "--json", found, timeout=120)
    (verdict,) = {row["verdict"] for row in json.loads(found.read_text()) if row["subject"] == "this job"}
    return verdict, done.returncode


def test_doctor_under_srun(slurm):
    assert this_job(slurm, *SRUN) == ("ok", 0)
    verdict, code = this_job(slurm, *SRUN, "--mpi=none")
    assert verdict == "broken"
    assert code != 0


def test_tasks_in_containers_that_hide_srun(mpich):
    """A namespace of their own, and no variable of Slurm, as containers without root have it."""
    clean = ("env", "-i", f"PATH={mpich.environment['PATH']}")
    words = (*SRUN, "unshare", "--user", "--map-root-user", *clean, "treeattn", "decode", CACHE)
    done = mpich.command(*words, timeout=120)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.startswith("treeattn: ")


@pytest.mark.parametrize("started", [(), ("salloc", "--nodes=2", "--ntasks=4")], ids=["login", "no srun"])
def test_one_process_that_srun_did_not_start(mpich, started):
    """Beside all jobs, as on a login node, and in a job of four tasks: it works, and its results say so."""
    assert this_job(mpich, *started) == ("slow", 0)
    results = mpich.folder / "results.json"
    done = mpich.command(*started, "treeattn", "decode", CACHE, "--repeat", 1, "--json", results, timeout=120)
    assert done.returncode == 0, done.stderr
    facts = json.loads(results.read_text())
    assert [rank["rank"] for rank in facts["ranks"]] == [0]
    assert "srun" in facts["warning"]
