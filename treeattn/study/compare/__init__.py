"""Schemes measured side by side: blocks, clocks, inputs, and the file of results."""
