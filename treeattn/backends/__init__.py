"""Where partial attention is computed: the processor (`cpu`) or an NVIDIA GPU (`cuda`).

A backend knows nothing of MPI. Each plans the same three verbs, attention, merge and finish, which read and
write records as `treeattn.partial` defines them.
"""
