"""Reports and benchmarks: `tfmw env`, `tfmw bench`, `tfmw check PATH`.

Read `bench.py` first, `cost.py` is its model of a step. May import: everything but `tfmw.cli`.
"""
