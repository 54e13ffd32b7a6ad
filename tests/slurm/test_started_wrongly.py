"""Tasks of a real srun that do not find each other say so, and so does what runs beside the jobs."""

from __future__ import annotations

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
    if (own, plugin) == ("pmi2", "pmix"):
        assert "unsupported PMI version PMIx" in done.stderr + done.stdout  # MPICH itself ends the job
        return
    assert "treeattn: the launcher started 4 processes" in done.stderr
    assert "--mpi=pmix for Open MPI" in done.stderr


def test_doctor_under_srun(slurm):
    good = slurm.command(*SRUN, "treeattn", "doctor", timeout=120)
    assert good.returncode == 0, good.stdout + good.stderr
    assert "this job ok 4 ranks that find each other" in " ".join(good.stdout.split())
    bad = slurm.command(*SRUN, "--mpi=none", "treeattn", "doctor", timeout=120)
    assert bad.returncode != 0
    assert "this job broken the launcher started 4 processes" in " ".join(bad.stdout.split())


def test_tasks_in_containers_that_hide_srun(mpich):
    """A namespace of their own, and no variable of Slurm, as containers without root have it."""
    clean = ("env", "-i", f"PATH={mpich.environment['PATH']}")
    words = (*SRUN, "unshare", "--user", "--map-root-user", *clean, "treeattn", "decode", CACHE)
    done = mpich.command(*words, timeout=120)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "one of 2 processes, each of which would be rank 0" in done.stderr


def test_beside_the_jobs(mpich):
    done = mpich.command("treeattn", "decode", CACHE, "--repeat", 1)
    assert done.returncode == 0, done.stderr
    assert "note: outside of any job of this Slurm cluster" in " ".join(done.stdout.split())


def test_one_process_in_a_job_of_several_tasks(mpich):
    words = ("salloc", "--nodes=2", "--ntasks=4", "treeattn", "decode", CACHE, "--repeat", 1)
    done = mpich.command(*words, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "note: one process in a job of 4 tasks: start it with srun" in " ".join(done.stdout.split())
