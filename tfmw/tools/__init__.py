"""Reports, jobs and benchmarks: `tfmw env`, `tfmw check PATH`, `tfmw status`, `tfmw bench`.

Read `bench.py` first. May import: everything but `tfmw.cli`.
"""
