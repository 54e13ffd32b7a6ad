"""Measuring reductions: the harness, its results, figures, and the paper's experiments."""
