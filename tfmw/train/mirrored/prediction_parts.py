"""Predictions that workers write to files, part by part, and continue after a failure.

All workers predict the same number of global batches. Then each writes a part with its own rows,
and the chief adds these parts and the position in the data to the index. A run that was killed
continues behind the last parts in the index, on any number of workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfmw import data
from tfmw.cluster.group import Group
from tfmw.compat import datasets
from tfmw.compat.pipelines import Pipeline
from tfmw.data import comparison, prediction_files
from tfmw.data.prediction_files import ROW, Column
from tfmw.errors import UsageError
from tfmw.storage import directories, disk
from tfmw.storage.bucket import refuse_writing
from tfmw.tables.table import is_table
from tfmw.train.epoch_iterator import EpochIterator
from tfmw.train.fit_context import FitContext
from tfmw.train.mirrored.prediction import Predictions, features_of, gathered_rows, order_of
from tfmw.train.mirrored.sync_driver import SyncDriver
from tfmw.train.pace import CallPace, last_batch_number

PART_BYTES = 64 << 20
"""About the most bytes of a part, which a worker holds in memory."""

PART_S = 30.0
"""About the most seconds of a part, which are lost in a failure."""

_GROWTH = 8  # the most by which a part has more batches than the one before
_NAME = re.compile(r"part-\d{8}-\d+-of-\d+(\.parquet|\.tfrecord)?")
_LOCK = "_lock"


class PredictionParts:
    """The files of one call of `tfmw.predict`; a context manager, which locks their directory.

    Args:
        output_dir: the directory of the files.
        format: "npy", "parquet" or "tfrecord".
        keys: names of features to write beside the predictions.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        format: str,
        keys: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ):
        refuse_writing(output_dir, "prediction")
        self.path = os.path.abspath(disk.without_scheme(os.fspath(output_dir)))
        directories.check_name(self.path)
        prediction_files.check_format(format)
        self._format, self._keys, self._clock = format, keys, clock
        self._lock = contextlib.ExitStack()
        # The chief has all of the index, other tasks only part of it.
        self._index: dict[str, Any] = {}

    def __enter__(self) -> PredictionParts:
        return self

    def __exit__(self, *error: Any) -> None:
        self._lock.close()

    # ---- the beginning -------------------------------------------------------------------------

    def open(self, context: FitContext, source: data.Source) -> dict[str, Any] | None:
        """Reads the index; returns the position in the data, or None. All tasks call it.

        Raises:
            UsageError: another run writes to the directory, or the data have no positions.
        """
        if data.is_at_most_once(source.x):
            raise UsageError(
                "received output_dir= and a dataset of tf.data's service, which has no positions: "
                "each row cannot be written exactly once. Pass the files themselves."
            )
        self._context, self._source = context, source

        def read() -> dict[str, Any]:
            held = directories.locked(self.path, _LOCK)
            self._lock.enter_context(held)
            directories.clean_up(self.path, _NAME)
            self._index = prediction_files.read_index(self.path) or {
                "complete": False, "rows": 0, "format": self._format, "columns": None,
                "position": None, "of": None, "parts": [],
            }  # fmt: skip
            return {k: v for k, v in self._index.items() if k != "parts"}

        index = context.group.from_chief(read)
        self._index = self._index or index
        position: dict[str, Any] | None = self._index["position"]
        return position

    def check(self, batches: EpochIterator) -> None:
        """Compares the call with the one that began the files. All tasks call it.

        Raises:
            UsageError: it differs.
        """
        features_of(batches.shard.element_spec, self._keys)
        sharding = self._context.sharding

        def compare() -> None:
            described: list[Any] = list(comparison.described(self._source.x))
            if datasets.is_dataset(self._source.x):
                nodes = Pipeline.of(self._source.x).nodes
                described += [node.seeds for node in nodes if node.kind == "shuffle"]
            now: dict[str, Any] = {
                "the weights": self._digest_of_weights(),
                "the data": hashlib.sha256(json.dumps(described).encode()).hexdigest(),
                "the batch size": batches.shard.batch_size,
                "steps": self._source.steps,
                "keys": list(self._keys),
                "format": self._format,
            }
            if self._source.is_function() or not self._source.split:
                # The order of the rows depends on the replicas.
                now["the number of replicas"] = [sharding.workers, sharding.replicas]
            was = self._index["of"] or now
            if different := [name for name in {**was, **now} if was.get(name) != now.get(name)]:
                raise UsageError(
                    f"output_dir {self.path!r} has predictions of another call: "
                    f"{' and '.join(different)} differ. Name another directory, or remove this one."
                )
            self._index["of"] = now

        self._context.group.from_chief(compare)
        if self._index["position"] is not None:
            batches.restore_position()

    def _digest_of_weights(self) -> str:
        digest = hashlib.sha256()
        for weight in self._context.model.weights:
            if not is_table(weight):
                array = np.ascontiguousarray(weight.numpy())
                digest.update(f"{array.dtype} {array.shape}".encode())
                digest.update(array.view(np.uint8).data if array.size else b"")
        return digest.hexdigest()

    # ---- the parts -----------------------------------------------------------------------------

    def write(
        self, driver: SyncDriver, group: Group, batches: EpochIterator, callback_list: Any
    ) -> str:
        """Predicts what is not in the index yet; returns the path of the index.

        All tasks call it.
        """
        index = os.path.join(self.path, prediction_files.INDEX)
        if self._index["complete"]:
            return index
        model, total = driver.model, batches.steps_per_epoch
        model.stop_predicting = False
        callback_list.on_predict_begin()
        batches.begin_epoch()
        predictions = Predictions(driver, batches.iterator, self._keys)
        # Each task has its own pace within a part, as its pipeline may be longer than others'.
        pace = CallPace(Group(0, 1), model.steps_per_execution, every_batch=False)
        most, more, stops = 1, True, False
        while more and not stops:
            limit = most if total is None else min(most, total - batches.steps_done)
            begun = self._clock()
            steps = self._predict(predictions, pace, batches.steps_done, limit, callback_list)
            part = self._write_part(driver, predictions, batches.steps_done)
            facts = [steps, part, self._clock() - begun, bool(model.stop_predicting)]
            all_facts = group.from_all(facts)
            steps = max(each[0] for each in all_facts)
            stops = any(each[3] for each in all_facts)
            batches.advance(steps, steps)
            more = steps == limit and batches.steps_done != total
            self._commit([each[1] for each in all_facts if each[1]], batches, complete=not more)
            most = _next_steps(steps, all_facts)
        batches.end_epoch()
        batches.leave()
        callback_list.on_predict_end()
        return index

    def _predict(
        self, predictions: Predictions, pace: CallPace, first: int, limit: int, callback_list: Any
    ) -> int:
        """Predicts up to `limit` global batches; returns their number."""
        done = 0
        while done < limit:
            asked = min(pace.next_steps(), limit - done)
            callback_list.on_predict_batch_begin(first + done)
            with pace.timed(asked):
                steps = predictions.extend(asked)
            done += steps
            if steps:
                callback_list.on_predict_batch_end(last_batch_number(first + done, 1, False), {})
            if steps < asked:
                break
        return done

    def _write_part(
        self, driver: SyncDriver, predictions: Predictions, first: int
    ) -> dict[str, Any] | None:
        """Writes this task's rows; returns the entry of the index, None if there are no rows."""
        replicas, splits, begin = driver.replicas, driver.splits, self._index["rows"]
        group = replicas.group
        pieces, own = predictions.taken()
        with replicas.step_errors(splits):
            all_rows = gathered_rows(replicas, own)
        counts = [int((rows if splits else rows[..., :1]).sum()) for rows in all_rows]
        count, before = counts[group.rank], sum(counts[: group.rank])
        self._index["rows"] = begin + sum(counts)
        if not count:
            return None
        order = order_of(all_rows, replicas.local, None if splits else 0)
        numbers = np.empty_like(order)
        numbers[order] = np.arange(len(order))
        columns = {ROW: Column(begin + numbers[before : before + count], [])}
        for (name, varies), of_name in zip(predictions.names().items(), pieces, strict=True):
            columns[name] = prediction_files.joined(name, of_name, varies)
            if columns[name].rows != count:
                raise UsageError(
                    f"the output {name!r} has {columns[name].rows} rows for {count} examples: for "
                    "output_dir=, expected one row for each example."
                )
        file = prediction_files.write_part(
            self.path, f"part-{first:08d}-{group.rank}-of-{group.size}", self._format, columns
        )
        numbers = columns[ROW].flat
        return {
            "name": file, "group": begin, "rows": count, "first": int(numbers.min()),
            "last": int(numbers.max()), "bytes": sum(c.nbytes for c in columns.values()),
            "columns": {name: c.kind for name, c in columns.items()},
        }  # fmt: skip

    def _commit(self, parts: list[dict[str, Any]], batches: EpochIterator, complete: bool) -> None:
        """Adds all tasks' parts to the index."""
        for part in parts:
            known = self._index["columns"] = self._index["columns"] or part["columns"]
            if (found := part.pop("columns")) != known:
                raise UsageError(
                    f"the outputs change from batch to batch: {found} after {known} (dtype, shape "
                    "of a value, ragged dimensions). For output_dir=, expected one kind of each."
                )
        if complete and not self._index["rows"]:
            raise data.empty_dataset()
        position = None if complete else dataclasses.asdict(batches.position(in_epoch=True))

        def write() -> None:
            names = os.listdir(self.path) if parts else ()
            if missing := [part["name"] for part in parts if part["name"] not in names]:
                raise UsageError(
                    f"{missing[0]} was written to output_dir {self.path!r}, and the chief does not "
                    "see it: name a directory that all workers share."
                )
            self._index |= {"complete": complete, "position": position}
            self._index["parts"] += parts
            prediction_files.write_index(self.path, self._index)
            if complete:
                self._remove_others()

        self._context.group.from_chief(write)

    def _remove_others(self) -> None:
        """Removes parts that an interrupted run has written and not added to the index."""
        known = {part["name"] for part in self._index["parts"]}
        for name in os.listdir(self.path):
            if _NAME.fullmatch(name) and name not in known:
                directories.remove(os.path.join(self.path, name))


def _next_steps(steps: int, all_facts: list[Any]) -> int:
    """The most global batches of the next part, the same on all tasks."""
    steps = max(steps, 1)
    most_bytes = max(part["bytes"] if part else 0 for _, part, _, _ in all_facts)
    seconds = max(seconds for _, _, seconds, _ in all_facts)
    of_bytes = steps * PART_BYTES // max(most_bytes, 1)
    of_seconds = int(steps * PART_S / max(seconds, 1e-3))
    return max(1, min(steps * _GROWTH, of_bytes, of_seconds))
