"""Benchmarks: each says in its docstring what it measures and how it is started."""
