"""Ways to run one and the same schedule: over MPI, over NCCL, and in one process."""
