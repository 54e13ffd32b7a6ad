"""Reductions that a library performs: reducers, not schedules, since we do not see what they do."""
