"""Fuzzers: `make fuzz`. What they find becomes a case of a test beside what it broke."""
