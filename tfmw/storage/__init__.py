"""Directories that appear atomically, durable files, and fences between attempts.

Read `directories.py` first. `disk.py` flushes files and finds the file system of a path; `fence.py`
refuses writes of an attempt that has been superseded. `bucket.py` reads and writes the objects of a
bucket, and `leased_object.py` implements a lock in it.

May import: `tfmw.errors`.
"""

from tfmw.storage.bucket import upload

__all__ = ["upload"]
