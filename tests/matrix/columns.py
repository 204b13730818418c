"""Runs rows of the matrix, all in one launch, and keeps their results.

    python -m tests.matrix.columns FOLDER reference,devices [ROW...]             # one process
    tfmw run --workers 2 tests/programs/matrix.py FOLDER COLUMN 1 [ROW...]       # a cluster

FOLDER gets one `<column>.<name of row>.npz` per row and column, and `<column>.json` with times,
errors and, of each task, a digest of the weights.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tfmw
from tests.matrix import rows  # noqa: F401  registers all rows
from tests.matrix.row import ROWS, Row, run


def run_all(
    names: list[str],
    strategy: tf.distribute.Strategy | str | None,
    column: str,
    folder: Path | None,
    **options: Any,
) -> dict[str, Any]:
    """Runs rows one after the other.

    Args:
        names: of rows.
        folder: where results are kept; None keeps none (all tasks but the chief).
        **options: arguments of `tfmw.fit` besides.

    Returns:
        Name of row -> {"seconds", "error" (a traceback or None), "digest" of the weights}.
    """
    report: dict[str, Any] = {}
    for name in names:
        # The collector needn't walk again and again through what was imported, nor through what
        # TensorFlow and Keras keep of earlier rows.
        gc.collect()
        gc.freeze()
        begin = time.perf_counter()
        error = digest = None
        try:
            results = run(ROWS[name], strategy, **options)
            digest = digest_of(results)
            if folder is not None:
                np.savez(_path(folder, column, name), **_savable(results))
        except Exception:
            error = traceback.format_exc()
        report[name] = {
            "seconds": round(time.perf_counter() - begin, 2),
            "error": error,
            "digest": digest,
        }
    return report


def digest_of(results: dict[str, np.ndarray]) -> str:
    """Digest of all results that must be the same on all tasks."""
    digest = hashlib.sha256()
    for name, value in sorted(results.items()):
        if name != "warned":
            digest.update(name.encode() + np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def load(folder: Path, column: str, row: Row) -> dict[str, np.ndarray]:
    with np.load(_path(folder, column, row.name)) as file:
        return {name.replace("|", "/"): file[name] for name in file.files}


def _path(folder: Path, column: str, name: str) -> Path:
    return folder / f"{column}.{re.sub('[^a-zA-Z0-9]+', '_', name)}.npz"


def _savable(results: dict[str, np.ndarray]) -> dict[str, Any]:
    # Names become files of an archive.
    return {name.replace("/", "|"): value for name, value in results.items()}


def virtual_devices(number: int) -> None:
    """Gives this process virtual CPU devices; once, before the first op."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * number
    )


def main(folder: Path, columns: list[str], names: list[str]) -> None:
    """Runs the columns that need one process: "reference" and "devices"."""
    virtual_devices(2)
    strategy = tfmw.strategies.mirrored(["CPU:0", "CPU:1"])
    for column in columns:
        chosen = strategy if column == "devices" else None
        report = run_all(names, chosen, column, folder)
        (folder / f"{column}.json").write_text(json.dumps([report]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
