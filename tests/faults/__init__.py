"""Faults done for real: what happens, what one sees of it, within what time, and what is kept.

`table.py` holds the rows, `jobs.py` starts what they befall, `test_rows.py` does each of them, and
`python -m tests.faults` does them all several times and writes `docs/faults.md`.
"""
