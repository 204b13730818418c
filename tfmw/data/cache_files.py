"""Cache files of each worker, as two writers of one file fail."""

from __future__ import annotations

import tensorflow as tf

from tfmw.cluster.group import Group

_begun: set[str] = set()  # files that this process has written or read


def own_file(file: str, group: Group) -> str:
    """This worker's file, such as "train.worker-1-of-2". All workers must call it.

    A user's file that is complete on all workers is read by all. Before the first use in a process,
    the files of killed workers are removed. Files of several workers have the same order only if
    all are complete.
    """
    own = f"{file}.worker-{group.rank}-of-{group.size}"
    index, lock = f"{own}.index", f"{own}_0.lockfile"  # kernels/data/cache_dataset_ops.cc
    complete = group.from_all([tf.io.gfile.exists(path) for path in (f"{file}.index", index)])
    of_user, of_workers = (all(found) for found in zip(*complete, strict=True))
    if of_user:
        return file
    if own not in _begun:
        for left in (lock,) if of_workers else (lock, index):
            if tf.io.gfile.exists(left):
                tf.io.gfile.remove(left)
    _begun.add(own)
    return own
