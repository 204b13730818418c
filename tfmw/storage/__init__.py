"""Directories that appear whole or not at all, durable files, and fences between attempts.

Read `directories.py` first. `disk.py` flushes files and finds the file system of a path; `fence.py`
refuses writes of an attempt that has been superseded. `bucket.py` has the objects of a bucket, and
`leased_object.py` a lock in it.

May import: `tfmw.errors`.
"""
