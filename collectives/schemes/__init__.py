"""The generators, one file each: pure functions from a size and parameters to a `Schedule`."""
