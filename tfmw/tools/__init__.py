"""Reports and benchmarks: `tfmw env`, `tfmw bench`, `tfmw check PATH`.

Read `bench.py` first. May import: everything but `tfmw.cli`.
"""
