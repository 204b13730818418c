"""Reading TensorFlow Datasets from many processes at once.

`tfds.load` prepares a dataset (downloads, converts, writes TFRecords) at its first use. If several
processes on one file system call it, each prepares the dataset, and all but one fail when they
rename their copy. Here one process prepares the dataset, and the other processes wait:

    from tfmw import datasets

    train = datasets.load("tfmw_digits", "train", as_supervised=True)   # ships with tfmw
    train = datasets.load("mnist", "train", as_supervised=True)         # downloaded by TFDS

Importing `tfmw.data.datasets.digits` registers the name "tfmw_digits" with TFDS; `load` imports it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from tfmw.compat.downloads import share_preparation

__all__ = ["default_data_dir", "load", "prepared"]

share_preparation(tfds)

# Datasets that ship with tfmw: their names, and the modules that register them.
_OWN = {"tfmw_digits": "tfmw.data.datasets.digits"}


def load(
    name: str, split: str, *, data_dir: str | os.PathLike[str] | None = None, **kwargs: Any
) -> Any:
    """Reads a dataset as `tfds.load` does, preparing it first, in one process at a time.

    Args:
        name: a TFDS name: "tfmw_digits", "mnist", "my_dataset/config:1.0.0".
        split: a TFDS split: "train", "test", "train+test", "train[:80%]".
        data_dir: directory of the TFRecords. By default that of TFDS, or `default_data_dir()` for
            the datasets that ship with tfmw.
        **kwargs: to `tfds.load`: `as_supervised`, `read_config`, `shuffle_files`, ...

    Returns:
        The result of `tfds.load`: by default a `tf.data.Dataset` of unbatched examples.
    """
    prepared(name, data_dir=data_dir)
    where = None if data_dir is None else os.fspath(data_dir)
    return tfds.load(name, split=split, data_dir=where, download=False, **kwargs)


def prepared(
    name: str, *, data_dir: str | os.PathLike[str] | None = None
) -> tfds.core.DatasetBuilder:
    """The builder of a dataset, after preparing it in one process at a time.

    Args:
        name, data_dir: as for `load`.
    """
    own = _OWN.get(name.partition("/")[0].partition(":")[0])
    if own is not None:
        importlib.import_module(own)
    where = None if data_dir is None else os.fspath(data_dir)
    builder = tfds.builder(name, data_dir=where)
    if not builder.data_path.exists():
        builder.download_and_prepare()
    return builder


def default_data_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory in which the datasets that ship with tfmw are prepared.

    `$TFDS_DATA_DIR`, TFDS's own setting, if it is set; else `tfmw/datasets` in the user's cache
    directory (`$XDG_CACHE_HOME`, `$HOME/.cache`); else, without a writable home, a directory of
    this user in the system's temporary directory.
    """
    if explicit := environ.get("TFDS_DATA_DIR"):
        return Path(explicit)
    cache = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG base directory specification: relative means unset
        cache = os.path.join(environ.get("HOME", ""), ".cache")
    if os.path.isabs(cache):
        path = Path(cache, "tfmw", "datasets")
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            if os.access(path, os.W_OK | os.X_OK):
                return path
    return _private_temporary_dir(environ)


def _private_temporary_dir(environ: Mapping[str, str]) -> Path:
    """`/tmp/tfmw-UID/datasets`: the same for every process of this user, for no other user."""
    home = Path(environ.get("TMPDIR") or tempfile.gettempdir(), f"tfmw-{os.getuid()}")
    with contextlib.suppress(OSError):
        home.mkdir(mode=0o700, exist_ok=True)
        status = home.lstat()
        if status.st_uid == os.getuid() and status.st_mode & 0o170022 == 0o040000:
            return home / "datasets"
    # Another user owns that directory, or may write to it.
    return Path(tempfile.mkdtemp(prefix="tfmw-"), "datasets")
