"""Reports and benchmarks: `tfmw env`, `tfmw bench`, `tfmw check PATH`.

May import: everything but `tfmw.cli`.
"""
