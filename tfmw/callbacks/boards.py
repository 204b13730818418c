"""Event files of `keras.callbacks.TensorBoard`: written before a backup, cut after a restart."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfmw.keras_compat import models


def flush(callbacks: Iterable[Any]) -> None:
    """Writes what TensorFlow still buffers: up to two minutes of events."""
    for callback in callbacks:
        callback = getattr(callback, "callback", callback)
        if isinstance(callback, keras.callbacks.TensorBoard):
            for writer in models.event_writers(callback):
                writer.flush()


def forget_events(board: keras.callbacks.TensorBoard, epoch: int, step: int) -> None:
    """Removes from event files what will be trained, and written, again.

    Args:
        board: the callback; it names its values by what counts their steps.
        epoch: the first epoch that is trained again, from 0.
        step: training steps that are not trained again.
    """
    if "://" in os.fspath(board.log_dir):
        return
    for path in Path(board.log_dir).glob("*/events.out.tfevents.*"):
        records = [record.numpy() for record in tf.data.TFRecordDataset(str(path))]
        kept = [record for record in records if not _is_repeated(record, epoch, step)]
        if len(kept) < len(records):
            temporary = f"{path}.tmp"
            with tf.io.TFRecordWriter(temporary) as out:
                for record in kept:
                    out.write(record)
            os.replace(temporary, path)


def _is_repeated(record: bytes, epoch: int, step: int) -> bool:
    """Whether an event holds a value of an epoch or a step that comes again."""
    event = tf.compat.v1.Event.FromString(record)
    for value in event.summary.value:
        if value.tag.startswith("epoch_"):
            return bool(event.step >= epoch)
        if value.tag.startswith(("batch_", "evaluation_")):
            return bool(event.step > step)
    return False
