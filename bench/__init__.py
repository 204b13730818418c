"""Benchmarks; the docstring of each says what it measures and how to start it."""
