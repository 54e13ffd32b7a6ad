"""How near the kernels come to bare reading."""
