"""Times that others published, predicted: what schedules cost on supercomputers, fitted on some runs, held
against the others. docs/predicted.md says how well, and what it misses."""
