"""The test suite: `tests.support` holds what several rooms share."""
