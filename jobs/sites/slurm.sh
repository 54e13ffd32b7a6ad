# shellcheck shell=bash disable=SC2034
# Any Slurm whose srun starts the MPI that mpi4py loads. If its default is another, `export SLURM_MPI_TYPE=pmi2`
# (MPICH, Intel MPI) or `pmix` (Open MPI) before sbatch; `srun --mpi=list` names what there is.
LAUNCHER=srun
