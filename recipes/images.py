"""Trains a classifier on image files, with augmentation, on one process or many.

    python recipes/images.py --image_dir=photos    # photos/cat/1.jpg, photos/dog/2.png, ...
    tfmw run --workers 2 recipes/images.py         # digits as files, written first
    tfmw run --workers 2 recipes/images.py --tars=s3://bucket/train-*.tar --test_tars=...

`--image_dir` has a folder of files for each class, the same on all machines. `--tars` are tar files
of samples, a "png" and its class as "cls", on a shared disk or in a bucket. Each worker reads and
decodes its own examples only. Augmentation is part of the model: each replica draws its own
changes, so results differ from those of one process, as with dropout.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import common
import keras
import tensorflow as tf
from absl import flags

import tfmw
from tfmw import datasets

FLAGS = flags.FLAGS
flags.DEFINE_string("image_dir", None, "A folder of images for each class; digits by default.")
flags.DEFINE_list("tars", None, "Tar files of training samples, in place of --image_dir.")
flags.DEFINE_list("test_tars", None, "Tar files of test samples, with --tars.")
flags.DEFINE_string("index_dir", None, "Directory that keeps the index of tar files.")
flags.DEFINE_string("cache_dir", None, "Local directory for samples of tar files in a bucket.")
flags.DEFINE_integer("classes", 10, "Number of classes in tar files.", 2)
flags.DEFINE_integer("image_size", 16, "Height and width to which images are resized.", 8)


def main() -> None:
    """Trains, reports and exports by the flags."""
    cluster = common.init()  # before any TensorFlow op
    if FLAGS.tars:
        train = tar_data(FLAGS.tars, FLAGS.image_size, FLAGS.batch_size, shuffled=True)
        test = tar_data(FLAGS.test_tars, FLAGS.image_size, FLAGS.batch_size)
        classes = FLAGS.classes
    else:
        folder = FLAGS.image_dir or write_digits(Path("build/recipe-images"))
        train, test, classes = make_data(folder, FLAGS.image_size, FLAGS.batch_size)
    model = make_model(FLAGS.image_size, classes)
    train, epochs, steps = common.limits(train, cluster)
    history = tfmw.fit(
        model,
        train,
        epochs=epochs,
        steps_per_epoch=steps,
        validation_data=test,
        strategy=FLAGS.strategy,
        backup_dir=FLAGS.backup_dir,
        export_dir=FLAGS.export_dir,
    )
    common.report(history, cluster)


def write_digits(folder: Path) -> Path:
    """Writes the digits that ship with tfmw as folder/<digit>/<number>.png, once."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        half = Path(tempfile.mkdtemp(dir=folder.parent))
        for number, (image, label) in enumerate(
            datasets.load("tfmw_digits", "train", as_supervised=True)
        ):
            path = half / str(int(label)) / f"{number:04}.png"
            path.parent.mkdir(exist_ok=True)
            pixels = tf.cast(tf.minimum(tf.cast(image, tf.int32) * 16, 255), tf.uint8)
            path.write_bytes(tf.io.encode_png(pixels).numpy())
        try:
            os.rename(half, folder)  # whole, or not at all: several tasks write at once
        except OSError:
            shutil.rmtree(half)  # another task was first
    return folder


def make_data(
    folder: str | Path, size: int, batch_size: int
) -> tuple[tf.data.Dataset, tf.data.Dataset, int]:
    """(training data, test data, number of classes): (image uint8 [batch, size, size, 1], label).

    A fifth of the files is the test data. All workers find the files in the same order.
    """
    names = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    files = [
        (str(p), i) for i, name in enumerate(names) for p in sorted(Path(folder, name).iterdir())
    ]

    def read(path: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return decoded(tf.io.read_file(path), size), label

    def dataset(chosen: list[tuple[str, int]]) -> tf.data.Dataset:
        paths, labels = zip(*chosen, strict=True)
        return tf.data.Dataset.from_tensor_slices((list(paths), list(labels)))

    train = dataset([file for number, file in enumerate(files) if number % 5])
    train = train.shuffle(len(files)).map(read, tf.data.AUTOTUNE).batch(batch_size)
    test = dataset(files[::5]).map(read, tf.data.AUTOTUNE).batch(batch_size)
    return train, test, len(names)


def tar_data(
    tars: list[str], size: int, batch_size: int, shuffled: bool = False
) -> tf.data.Dataset:
    """Batches of samples of tar files: (image uint8 [batch, size, size, 1], label)."""
    samples = tfmw.data.from_tars(
        tars, ["png", "cls"], index_dir=FLAGS.index_dir, cache_dir=FLAGS.cache_dir
    )
    if shuffled:
        samples = samples.shuffle(10_000)

    def read(sample: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        return decoded(sample["png"], size), tf.strings.to_number(sample["cls"], tf.int64)

    return samples.map(read, tf.data.AUTOTUNE).batch(batch_size)


def decoded(content: tf.Tensor, size: int) -> tf.Tensor:
    """The image in a file's content: uint8 [size, size, 1]."""
    image = tf.io.decode_image(content, channels=1, expand_animations=False)
    image.set_shape([None, None, 1])
    return tf.cast(tf.image.resize(image, [size, size]), tf.uint8)


def make_model(size: int, classes: int) -> keras.Model:
    """Augmentation, two convolutions and a classifier. Augmentation acts in training only."""
    model = keras.Sequential(
        [
            keras.Input((size, size, 1), dtype="uint8", name="image"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.RandomTranslation(0.1, 0.1, fill_mode="constant"),
            keras.layers.RandomRotation(0.03, fill_mode="constant"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(classes, activation="softmax", name="probabilities"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


if __name__ == "__main__":
    common.run(main)
