"""Ways to run one and the same schedule: over MPI, and in one process."""
