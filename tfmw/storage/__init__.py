"""Directories that appear whole or not at all, durable files, and fences between attempts.

Read `directories.py` first. `disk.py` flushes files and finds the file system of a path; `fence.py`
refuses writes of an attempt that has been superseded; `etcd.py` is a client of etcd.

May import: `tfmw.errors`.
"""
