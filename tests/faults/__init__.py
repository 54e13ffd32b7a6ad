"""Faults done for real: what happens, what one sees of it, within what time, and what is kept.

`table.py` holds the rows, `jobs.py` starts what they befall, and `test_rows.py` does each of them, for
`make faults` several times.
"""
