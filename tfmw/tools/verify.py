"""`tfmw check PATH ...`: verifies the checksums of backups and exports."""

from __future__ import annotations

import os


def problems_of(path: str) -> list[str]:
    """One sentence for each problem of a backup directory, one backup, or an export.

    Args:
        path: a value of `backup_dir=` or `export_dir=`; local, or a URL that `tf.io.gfile` opens.
    """
    import tensorflow as tf

    from tfmw.checkpoint import store
    from tfmw.export import MANIFEST, verify

    if not tf.io.gfile.isdir(path):
        return [f"{path} is not a directory."]
    names = [name.rstrip("/") for name in tf.io.gfile.listdir(path)]
    if MANIFEST in names or "saved_model.pb" in names:
        return verify(path)
    if any(name.startswith("step_") for name in [*names, os.path.basename(path.rstrip("/"))]):
        return store.verify(path)
    return [f"{path} contains neither an export of tfmw nor a backup."]


def report(paths: list[str]) -> int:
    """Prints the problems of each path, or that it has none. Returns the exit status, 0 or 1."""
    status = 0
    for path in paths:
        problems = problems_of(path)
        for problem in problems:
            print(f"damaged: {problem}")
        if problems:
            status = 1
        else:
            print(f"intact: {path}")
    return status
