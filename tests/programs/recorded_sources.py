"""Trains on one source of data after the other, and records the examples of each step.

recorded_sources.py FOLDER RUN KILLED SOURCE...

FOLDER has the files of `write_files`. Backups and records of each source go to FOLDER/RUN/SOURCE.
In the middle of the second epoch the newest backup is copied to "left" beside them: a kill would
leave it. A worker is killed there in the source KILLED.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import array_record.python.array_record_module as array_record
import datasets as hugging_face
import grain
import keras
import numpy as np
import pyarrow.parquet
import tensorflow as tf

import tfmw
from tests.programs import _result
from tfmw.compat import losses

N, BATCH, EPOCHS = 45, 8, 2
STEPS = 6  # of an epoch; the last batch has 5 examples
LEFT_AT, BACKED_UP = 10, 8  # steps: when it is killed, and the newest backup then


class Recorder(keras.Model):
    """Records (step, the examples of this replica) in a file; the number of an example is in x."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.head = keras.layers.Dense(1)
        self.head.build([None, 1])
        self._file = path.open("a")

    def train_step(self, data: Any) -> Any:
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        ids = tf.strings.to_number(x) if x.dtype == tf.string else x
        ids = tf.cast(tf.reshape(ids, [tf.shape(ids)[0], -1])[:, 0], tf.float32)
        weight = losses.current_weight()
        mine = ids if weight is None else ids[: weight.examples]
        tf.py_function(self._note, [self.optimizer.iterations, mine], [])
        self.optimizer.apply([tf.zeros_like(v) for v in self.trainable_variables])
        return {"loss": tf.reduce_sum(self.head(ids[:, None]))}

    def _note(self, step: Any, ids: Any) -> None:
        rows = ids.numpy().astype(int).tolist()
        if rows:  # a last step shows all workers that a pass of unknown length is over
            print(json.dumps([int(step), rows]), file=self._file, flush=True)


class Leave(keras.callbacks.Callback):
    """Copies the newest backup on the chief, and kills the last worker."""

    def __init__(self, folder: Path, kills: bool) -> None:
        super().__init__()
        # No attributes, which would be backed up and restored.
        self._acts = lambda: cluster.is_chief or kills
        self._act = lambda: self._leave(folder, kills)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._acts() and int(self.model.optimizer.iterations) == LEFT_AT:
            self._act()

    @staticmethod
    def _leave(folder: Path, kills: bool) -> None:
        backup = folder / "backups" / f"step_{BACKED_UP:012d}"
        while not backup.exists():
            time.sleep(0.01)
        if kills:
            os.kill(os.getpid(), signal.SIGKILL)
        shutil.copytree(backup, folder / "left" / backup.name)


SOURCES: dict[str, Callable[[Path], dict[str, Any]]] = {}


def source(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Adds a function of FOLDER, which returns a dataset or the arguments of `fit`."""

    def arguments(folder: Path) -> dict[str, Any]:
        made = make(folder)
        return made if isinstance(made, dict) else {"x": made}

    SOURCES[make.__name__] = arguments
    return make


def numbers() -> np.ndarray:
    return np.arange(N, dtype=np.float32)


@source
def slices(_: Path) -> Any:
    return tf.data.Dataset.from_tensor_slices(numbers()).shuffle(20).batch(BATCH)


@source
def arrays(_: Path) -> Any:
    return {"x": numbers()[:, None], "y": numbers(), "batch_size": BATCH}


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return -(-N // BATCH)

    def __getitem__(self, index: int) -> Any:
        return numbers()[index * BATCH :][:BATCH], numbers()[index * BATCH :][:BATCH]


@source
def py_dataset(_: Path) -> Any:
    return {"x": Batches(), "shuffle": True}


@source
def py_dataset_of_threads(_: Path) -> Any:
    return {"x": Batches(workers=2), "shuffle": True}


def _shuffled_by_grain() -> Any:
    return grain.MapDataset.source(numbers()).shuffle(seed=4)


@source
def grain_map_dataset(_: Path) -> Any:
    return _shuffled_by_grain().batch(BATCH)


@source
def grain_iter_dataset(_: Path) -> Any:
    whole = _shuffled_by_grain().filter(lambda row: True).to_iter_dataset()
    shuffled = grain.experimental.WindowShuffleIterDataset(whole, window_size=9, seed=1)
    return shuffled.batch(BATCH)


@source
def grain_loader(_: Path) -> Any:
    return grain.DataLoader(
        data_source=numbers(),
        sampler=grain.samplers.IndexSampler(N, shuffle=True, seed=2, num_epochs=1),
        operations=[grain.transforms.Batch(batch_size=BATCH)],
    )


def _hugging_face() -> Any:
    return hugging_face.Dataset.from_dict({"x": numbers().tolist()})


@source
def hugging_face_rows(_: Path) -> Any:
    return tfmw.data.from_index(_hugging_face()).map(lambda row: row["x"]).shuffle(20).batch(BATCH)


@source
def hugging_face_to_tf_dataset(_: Path) -> Any:
    return _hugging_face().to_tf_dataset(BATCH, columns="x", shuffle=False)


@source
def array_records(folder: Path) -> Any:
    rows = grain.sources.ArrayRecordDataSource(str(folder / "rows.array_record"))
    return tfmw.data.from_index(rows).map(tf.strings.to_number).shuffle(20).batch(BATCH)


@source
def parquet(folder: Path) -> Any:
    rows = tfmw.data.from_parquet(folder / "*.parquet").map(lambda row: row["x"])
    return rows.shuffle(20).batch(BATCH)


def _records(folder: Path) -> list[str]:
    return sorted(map(str, folder.glob("*.tfrecord")))


@source
def tfrecords(folder: Path) -> Any:
    records = tfmw.data.from_records(_records(folder), index_dir=folder / "index")
    return records.map(tf.strings.to_number).shuffle(20).batch(BATCH)


@source
def lines_of_text(folder: Path) -> Any:
    records = tfmw.data.from_records(folder / "rows.txt", kind="text")
    return records.map(tf.strings.to_number).shuffle(20).batch(BATCH)


@source
def tars(folder: Path) -> Any:
    samples = tfmw.data.from_tars(sorted(folder.glob("*.tar")), ["txt"])
    return samples.map(lambda s: tf.strings.to_number(s["txt"])).shuffle(20).batch(BATCH)


@source
def tfrecord_dataset(folder: Path) -> Any:
    records = tf.data.TFRecordDataset(_records(folder))
    return records.map(tf.strings.to_number).shuffle(20).batch(BATCH)


@source
def interleaved_files(folder: Path) -> Any:
    files = tf.data.Dataset.from_tensor_slices(_records(folder)).shuffle(3)
    records = files.interleave(tf.data.TFRecordDataset, 2, 3, num_parallel_calls=2)
    return records.map(tf.strings.to_number).batch(BATCH)


@source
def range_repeated(_: Path) -> Any:
    """Epochs begin in the middle of passes."""
    endless = tf.data.Dataset.range(N).shuffle(20).repeat().batch(BATCH)
    return {"x": endless, "steps_per_epoch": STEPS}


@source
def filtered(_: Path) -> Any:
    return tf.data.Dataset.range(2 * N).filter(lambda i: i < N).shuffle(20).batch(BATCH)


@source
def from_generator(_: Path) -> Any:
    spec = tf.TensorSpec([], tf.float32)
    rows = tf.data.Dataset.from_generator(lambda: iter(numbers()), output_signature=spec)
    return rows.shuffle(20).batch(BATCH)


def _images(folder: Path, kind: str) -> Any:
    return keras.utils.image_dataset_from_directory(
        folder / "images", image_size=(2, 2), batch_size=BATCH, seed=1, format=kind, verbose=False
    )


@source
def images(folder: Path) -> Any:
    return _images(folder, "tf")


@source
def images_by_grain(folder: Path) -> Any:
    return _images(folder, "grain")


@source
def texts(folder: Path) -> Any:
    return keras.utils.text_dataset_from_directory(
        folder / "texts", batch_size=BATCH, seed=1, verbose=False
    )


@source
def sounds(folder: Path) -> Any:
    sounds = keras.utils.audio_dataset_from_directory(
        folder / "sounds", batch_size=BATCH, output_sequence_length=2, seed=1, verbose=False
    )
    return sounds.map(lambda samples, label: (samples * 2.0**15, label))  # of 16 bits


@source
def timeseries(_: Path) -> Any:
    return keras.utils.timeseries_dataset_from_array(
        np.arange(N + 3), np.arange(N), 4, batch_size=BATCH, shuffle=True, seed=1
    )


def write_files(folder: Path) -> None:
    """The files that sources read."""
    rows = [str(i) for i in range(N)]
    for part, name in ((slice(0, 20), "a"), (slice(20, 26), "b"), (slice(26, N), "c")):
        with tf.io.TFRecordWriter(str(folder / f"{name}.tfrecord")) as records:
            for row in rows[part]:
                records.write(row.encode())
        table = pyarrow.table({"x": numbers()[part]})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=9)
    writer = array_record.ArrayRecordWriter(str(folder / "rows.array_record"), "group_size:1")
    for row in rows:
        writer.write(row.encode())
    writer.close()
    (folder / "rows.txt").write_text("\n".join(rows))
    for label in range(2):
        for kind in ("images", "texts", "sounds"):
            (folder / kind / str(label)).mkdir(parents=True)
        for i in range(label, N, 2):
            pixels: np.ndarray = np.full([2, 2, 3], i, np.uint8)
            keras.utils.save_img(folder / f"images/{label}/{i}.png", pixels, scale=False)
            (folder / f"texts/{label}/{i}.txt").write_text(str(i))
            sound = tf.audio.encode_wav(tf.fill([2, 1], i / 2**15), 8000)
            tf.io.write_file(str(folder / f"sounds/{label}/{i}.wav"), sound)
    for name, numbered in (("a", range(30)), ("b", range(30, N))):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for i in numbered:
                tar.add(folder / f"texts/{i % 2}/{i}.txt", f"{i}.txt")


def main() -> None:
    folder, run, killed, *chosen = sys.argv[1:]
    for name in chosen:
        own = Path(folder, run, name)
        own.mkdir(parents=True, exist_ok=True)
        keras.utils.set_random_seed(3)
        model = Recorder(own / f"worker {cluster.index} of {cluster.num_workers}")
        model.compile(keras.optimizers.SGD(), "mse")
        model.optimizer.build(model.trainable_variables)
        kills = name == killed and cluster.index == cluster.num_workers - 1
        tfmw.fit(
            model,
            **SOURCES[name](Path(folder)),
            epochs=EPOCHS,
            verbose=0,
            seed=7,
            callbacks=[Leave(own, kills)],
            backup_dir=own / "backups",
            backup_every=BACKED_UP,
        )
    _result.write({})


if __name__ == "__main__":
    cluster = tfmw.init()
    main()
