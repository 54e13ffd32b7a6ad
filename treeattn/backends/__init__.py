"""Where partial attention is computed: the processor (`cpu`) or an NVIDIA GPU (`cuda`).

A backend knows nothing of MPI. Each has the same three names: `partial_attention`, `merge`,
`finish`; they read and write records as `treeattn.partial` defines them.
"""
