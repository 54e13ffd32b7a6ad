# shellcheck shell=bash disable=SC2034,SC1091
# A site of yours: copy this to jobs/sites/mine.sh, edit what is marked, and
#
#   . jobs/sites/mine.sh && sbatch jobs/smoke.sbatch
#
# It is read twice: before sbatch, for the variables that sbatch reads; and within the job.
export TREEATTN_SITE=mine                # EDIT: the name of this file

# What sbatch reads.
export SBATCH_PARTITION=compute          # EDIT
# export SBATCH_ACCOUNT=project          # EDIT where jobs are charged to one
# export SBATCH_GPUS_PER_NODE=4          # EDIT for --device cuda

LAUNCHER=srun                            # EDIT: mpirun where the site starts MPI with it
LAUNCH_OPTIONS=(--mpi=pmix)              # EDIT: pmi2 for MPICH and Intel MPI; `srun --mpi=list`
LAUNCH_OPTIONS+=(--cpu-bind=cores)       # one rank, one core, and no wandering
# With GPUs a rank sees its own alone, the nearest one; or all of its node, and the ranks take them in turn.
# LAUNCH_OPTIONS+=(--gpus-per-task=1 --gpu-bind=single:1)    # EDIT
# LAUNCH_OPTIONS+=(--gpu-bind=none)                          # EDIT

if [ -n "${SLURM_JOB_ID:-}" ]; then
  # What makes `treeattn` and its MPI available on a node.
  module load openmpi                    # EDIT: the MPI that mpi4py was built for
  . "$HOME/treeattn/.venv/bin/activate"  # EDIT
fi
