"""Backups on disk: a directory of them, written atomically and verified when read.

    store = BackupStore("/shared/backups/run7")
    with store.locked():
        store.write(step=1200, tensors={"v/0": array}, record={"epoch": 3})
        found = store.newest()                    # None, or a Backup that passed every check
        found.record["epoch"], found.tensors()["v/0"]

One backup is one directory `step_<n>` with these files:

* `tensors.index`, `tensors.data-00000-of-00001`: a TensorFlow checkpoint (its tensor bundle
  format: named tensors, a CRC-32C for each). If several tasks write, each has its own data files:
  workers write shards of slots;
* `tables.index`, `tables.data-...`, only with tables (`tfmw.tables`): the same format, with all
  rows in slices, which the parameter servers write. They may be hard links to those of an earlier
  backup; then `tensors` has the rows that have changed since;
* `record.json`: everything else as JSON, with the SHA-256 of itself and the sizes of the other
  files. It is written last: a directory without a valid record is not a backup.

The record has the version of the format.

A backup appears whole or not at all, in a local directory or in a bucket (`backup_files.py`). The
two newest are kept, and one more if these share files of tables. Reading is safe: no pickle, no
code, no links followed, and never more memory than the files have bytes.

    problems = verify("/shared/backups/run7")         # [] or one sentence for each problem
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfmw.data import record_index
from tfmw.errors import TfmwError, UsageError, first_line
from tfmw.storage import directories, disk
from tfmw.tables import files
from tfmw.train.checkpoint.backup_files import NAME, files_of
from tfmw.train.checkpoint.tensor_files import PREFIX, TABLES, SavedTensors, SharedWrite, TableRows

logger = logging.getLogger("tfmw")

T = TypeVar("T")

EVALUATOR_LOCK = "EVALUATOR"
"""File that an evaluator locks while it watches, and removes after the last backup."""

KEPT = 2
_RECORD = "record.json"
_FORMAT = 3  # version of the format
_FILES = re.compile(rf"({PREFIX}|{TABLES})\.(index|data-\d{{5}}-of-\d{{5}})")
# Python's errors for content that `BackupStore` never writes; a deep record is a RecursionError.
_MALFORMED = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)
_LARGEST_RECORD = 256 << 20  # bytes; enough for the histories of a million epochs


class Damaged(TfmwError):
    """Error for a backup whose checksums do not match, or with content that is never written."""


@dataclasses.dataclass(frozen=True)
class Backup:
    """One complete and verified backup."""

    name: str  # directory of the backup, which may be in a bucket
    path: str  # local directory from which it is read
    step: int  # number of training steps at the time of the backup
    record: dict[str, Any]  # record of `BackupStore.write`
    layout: files.Layout  # the slices of tables
    changed: bool  # whether the checkpoint `PREFIX` has rows of tables that have changed since

    def tensors(self, servers: int = 0) -> SavedTensors:
        """All tensors by name. Raises Damaged if a checksum does not match.

        Args:
            servers: number of parameter servers, which read tables in place of this process.
        """
        prefix = os.path.join(self.path, PREFIX)
        try:
            with directories.checkpoint_reader(prefix) as reader:
                shapes, types = self._listed(reader, PREFIX)
                arrays = {
                    name: reader.get_tensor(name)
                    for name in sorted(shapes)
                    if name not in self.layout and not files.is_changed_rows(name)
                }
            whole = os.path.join(self.path, TABLES)
            if self.layout:
                with directories.checkpoint_reader(whole) as reader:
                    listed = self._listed(reader, TABLES)
                files.verify(whole, self.layout, *listed, servers)
            if self.changed:
                files.verify(prefix, self.layout, shapes, types, servers, only_changed=True)
            return SavedTensors(whole, arrays, self.layout, prefix if self.changed else None)
        except (*_MALFORMED, MemoryError, tf.errors.OpError) as e:
            raise Damaged(f"backup {self.name} is damaged: {first_line(e)}") from e

    def _listed(self, reader: Any, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The shapes and types of a checkpoint's tensors."""
        shapes = reader.get_variable_to_shape_map()
        types = reader.get_variable_to_dtype_map()
        # TensorFlow allocates the bytes that the index lists, so they must not exceed the files.
        listed = sum(math.prod(shapes[name]) * types[name].size for name in shapes)
        paths = directories.files_of(os.path.join(self.path, f"{prefix}.data-"))
        found = sum(map(os.path.getsize, paths))
        if listed > found:
            raise ValueError(f"its index lists {listed} bytes, its files have {found}")
        return shapes, types


class BackupStore:
    """A directory of backups, written by one process at a time.

    Args:
        path: a local directory, or one in a bucket, "s3://bucket/run7".
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.files = files_of(os.fspath(path))
        self.path = self.files.path
        if disk.is_local(self.path):
            directories.check_name(self.path)
        self.locked, self.path_of = self.files.locked, self.files.path_of
        self.steps = self.files.steps
        self._damaged: set[int] = set()  # steps of damaged backups

    def has_evaluator(self) -> bool:
        """Whether an evaluator watches this directory and has not evaluated all backups."""
        return os.path.exists(os.path.join(self.path, EVALUATOR_LOCK))

    # ------------------------------------------------------------ writing

    def write(
        self,
        step: int,
        tensors: Mapping[str, np.ndarray],
        record: Mapping[str, Any],
        shared: SharedWrite | None = None,
        rows: TableRows | None = None,
    ) -> str:
        """Writes one backup and removes all but the newest ones.

        Args:
            step: number of training steps so far; a backup of the same step is replaced.
            tensors: name -> array, of any dtype of TensorFlow.
            record: JSON values.
            shared: the shared write of several tasks.
            rows: rows of tables, which their servers write.

        Returns:
            The backup's directory.

        Raises:
            OSError or tf.errors.OpError: it could not be written; older backups are untouched.
            NotFinite: a table has a value that is not finite; older backups are untouched.
        """
        layout = {} if rows is None else rows.files.layout
        changed = rows is not None and rows.base is not None
        begun = self.files.begin(step) if shared is None else shared.begun
        with self.files.writing(step, begun) as directory:
            prefix = os.path.join(directory, PREFIX)
            if shared is not None:
                shared.write(prefix, tensors)
            elif rows is not None:
                rows.write(directory, tensors)
            else:
                files.save_tensors(prefix, tensors)
            _write_record(directory, step, layout, changed, record)
        self._damaged.discard(step)
        self._prune(step)
        return self.path_of(step)

    def _prune(self, newest: int) -> None:
        steps = self.steps()
        intact = [s for s in steps if s <= newest and s not in self._damaged]
        kept = intact[-KEPT:]
        # Backups that share files of tables are damaged together, so one that shares none is kept,
        # too.
        shared = {self._file_of_tables(s) for s in kept}
        if len(shared) == 1 and shared != {None}:
            kept += [s for s in intact if self._file_of_tables(s) not in shared][-1:]
        for step in steps:
            # Higher steps belong to an abandoned run: the last write is valid.
            if step not in kept:
                with contextlib.suppress(OSError):
                    self.files.remove(step)

    def _file_of_tables(self, step: int) -> int | None:
        """Identity of a backup's file of tables, equal for all links to it; None if it has none."""
        try:
            return os.stat(os.path.join(self.path_of(step), f"{TABLES}.index")).st_ino
        except OSError:
            return None

    def clear(self) -> None:
        """Removes all backups."""
        for step in self.steps():
            self.files.remove(step)
        self.files.remove_folder(record_index.DIRECTORY)

    # ------------------------------------------------------------ reading

    def newest(self) -> Backup | None:
        """The newest backup with valid record and sizes; see `newest_intact`."""
        return self.newest_intact(lambda backup: backup)

    def newest_intact(self, read: Callable[[Backup], T]) -> T | None:
        """Result of `read` for the newest backup that it can read; None if there are no backups.

        Damaged backups are logged and skipped.

        Args:
            read: function that may raise Damaged to get the next older backup.

        Raises:
            UsageError: there are backups, all damaged, or one of another version of this format.
        """
        damaged = []
        for step in reversed(self.steps()):
            backup = None
            try:
                backup = self.read(step)
                return read(backup)
            except Damaged as e:
                self._damaged.add(step)
                logger.warning("%s; the previous backup is used", e)
                if backup is not None:
                    damaged.append(f"step {step} is damaged")
                else:
                    damaged.append(str(e))
        if damaged:
            raise UsageError(
                f"no backup in {self.path!r} is intact ({'; '.join(damaged)}): restore one from "
                "elsewhere, or delete them to start anew."
            )
        return None

    def newest_run(self) -> Any:
        """The `run` in the record of the newest backup; None if there is no backup.

        Raises:
            Damaged: the record is damaged.
        """
        if not (steps := self.steps()):
            return None
        try:
            return _read_record(self.files.local(steps[-1], _RECORD))["record"]["run"]
        except (*_MALFORMED, OSError) as e:
            raise Damaged(f"backup {self.path_of(steps[-1])} is damaged: {first_line(e)}") from e

    def read(self, step: int) -> Backup:
        """The backup of one step.

        Raises:
            Damaged: the content has changed.
            UsageError: the backup has a format that this version does not read.
        """
        name = self.path_of(step)
        try:
            path = self.files.local(step)
            body = _read_record(path)
            layout = body.get("tables") or {}
            if body["format"] != _FORMAT:
                raise UsageError(
                    f"backup {name} has format {body['format']}, this version reads "
                    f"{_FORMAT}: resume with the version that wrote it, or use another "
                    "backup_dir."
                )
            for file, size in body["sizes"].items():
                if not _FILES.fullmatch(file):
                    raise ValueError(f"it lists a file {file!r}")
                found = os.path.getsize(os.path.join(path, file))
                if found != size:
                    raise ValueError(f"{file} has {found} of {size} bytes")
            index = directories.sha256(os.path.join(path, f"{PREFIX}.index"))
            of_tables = _index_of_tables(path, layout)
            if (index, of_tables) != (body["index_sha256"], body.get("tables_index_sha256")):
                raise ValueError("its index does not match its checksum")
            if body["step"] != step or not isinstance(body["record"], dict):
                raise ValueError(f"its record is of step {body['step']!r}")
        except UsageError:
            raise
        except (*_MALFORMED, OSError, tf.errors.OpError) as e:
            raise Damaged(f"backup {name} is damaged: {first_line(e)}") from e
        return Backup(name, path, step, body["record"], layout, bool(body.get("changed")))


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Compares backups with the checksums in their records.

    Args:
        path: a directory of backups, or one backup in it (`step_...`).

    Returns:
        One sentence for each problem; none if every backup is intact.
    """
    directory = disk.without_scheme(os.fspath(path)).rstrip("/")
    if disk.is_local(directory) and not os.path.isdir(directory):
        return [f"{directory} is not a directory."]
    parent, name = os.path.split(directory)
    one = NAME.fullmatch(name)
    store = BackupStore(parent if one else directory)
    steps = [int(one[1])] if one else store.steps()
    if not steps:
        return [f"{directory} holds no backup."]
    problems = []
    for step in steps:
        try:
            store.read(step).tensors()
        except TfmwError as e:
            problems.append(f"{e}.")
    return problems


def _write_record(
    directory: str, step: int, layout: files.Layout, changed: bool, record: Mapping[str, Any]
) -> None:
    """Writes the last file of a backup, which makes it complete."""
    names = sorted(filter(_FILES.fullmatch, os.listdir(directory)))
    text = json.dumps(
        {
            "format": _FORMAT,
            "step": step,
            "sizes": {n: os.path.getsize(os.path.join(directory, n)) for n in names},
            "index_sha256": directories.sha256(os.path.join(directory, f"{PREFIX}.index")),
            "tables_index_sha256": _index_of_tables(directory, layout),
            "tables": layout,
            "changed": changed,
            "record": dict(record),
        }
    )
    sealed = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text})
    with tf.io.gfile.GFile(os.path.join(directory, _RECORD), "w") as file:
        file.write(sealed)


def _read_record(directory: str) -> dict[str, Any]:
    """The content of a backup's last file. Raises ValueError if it is damaged."""
    path = os.path.join(directory, _RECORD)
    if not os.path.exists(path):
        raise ValueError(f"it has no {_RECORD}")
    if os.path.getsize(path) > _LARGEST_RECORD:
        raise ValueError(f"{_RECORD} is too large to be one")
    with open(path, encoding="utf-8") as file:
        sealed = json.load(file)
    if hashlib.sha256(sealed["body"].encode()).hexdigest() != sealed["sha256"]:
        raise ValueError(f"{_RECORD} does not match its checksum")
    body: dict[str, Any] = json.loads(sealed["body"])
    return body


def _index_of_tables(directory: str, layout: files.Layout) -> str | None:
    """Checksum of the index of tables, if there are any."""
    return directories.sha256(os.path.join(directory, f"{TABLES}.index")) if layout else None
