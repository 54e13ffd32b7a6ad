"""How near the kernels come to bare reading, on the processor and on a GPU."""
