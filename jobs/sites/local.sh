# shellcheck shell=bash disable=SC2034
# This machine, no scheduler. MPIEXEC names another launcher than the first `mpiexec` on the path.
LAUNCHER=mpirun
