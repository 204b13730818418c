"""Zipped pipelines, as Keras's datasets of directories and of time series: rows of each worker."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import cases, every
from tfmw import data
from tfmw.compat.pipelines import Pipeline
from tfmw.data.by_index import joined
from tfmw.data.seek import seek
from tfmw.data.sharding import shard_dataset

N, B = 22, 4


def _range(start: int = 0) -> tf.data.Dataset:
    return tf.data.Dataset.range(start, start + N)


def _slices() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices({"a": np.arange(N) * 2.0, "b": np.eye(N)})


def _constant() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(np.arange(N)[::-1]).repeat()


def _picked() -> tf.data.Dataset:
    return tf.data.Dataset.zip((_range(), _constant())).map(lambda i, all_: all_[i])


def _generated() -> tf.data.Dataset:
    spec = tf.TensorSpec([], tf.int64)
    return tf.data.Dataset.from_generator(lambda: iter(range(N - 3)), output_signature=spec)


def _zip(*parts: Any) -> tf.data.Dataset:
    return tf.data.Dataset.zip(*parts)


ZIPS: dict[str, Callable[[], tf.data.Dataset]] = {
    "slices": lambda: _zip((_slices(), _slices().take(N))),
    "sources": lambda: _zip({"x": _slices(), "y": (_range(5), _range(7))}),
    "maps": lambda: _zip(_slices().map(lambda row: row["b"]), _range().map(lambda i: (i, -i))),
    "parallel maps": lambda: _zip(
        _range().map(lambda i: i + 1, num_parallel_calls=2).prefetch(1), _slices()
    ),
    "zips": lambda: _zip((_picked(), _zip((_picked().map(lambda i: i * 2), _range(3))))),
    "other lengths": lambda: _zip(_range(4).map(lambda i: i), tf.data.Dataset.range(9)),
    "other sources": lambda: _zip(_generated().map(lambda i: i + 1), _range()),
    "shuffled parts": lambda: _zip(_range().shuffle(9, seed=1).map(lambda i: i + 1), _range()),
}


def _flat(elements: Any) -> list[list[Any]]:
    return [[np.asarray(t).tolist() for t in tf.nest.flatten(each)] for each in elements]


@pytest.mark.parametrize("name", ZIPS)
def test_a_zip_and_its_joined_form_have_the_same_elements(name: str) -> None:
    whole = ZIPS[name]()
    same = joined(Pipeline.of(whole))
    assert same is not None or name == "slices"
    dataset = whole if same is None else same.dataset
    assert dataset.element_spec == whole.element_spec
    assert dataset.cardinality() == whole.cardinality()
    assert _flat(dataset) == _flat(ZIPS[name]())


@pytest.mark.parametrize("position", cases([3], [0]))
@pytest.mark.parametrize("name", every(2, ZIPS))
def test_workers_divide_zips_in_their_order(name: str, position: int) -> None:
    def pipeline() -> tf.data.Dataset:
        return ZIPS[name]().shuffle(9, seed=2).map(lambda *parts: parts).batch(B)

    whole = [_flat([batch]) for batch in pipeline()][position:]
    for workers in (1, 2):
        shards = [
            list(
                shard_dataset(
                    pipeline(), data.Sharding(workers, rank), data.SharedOrder(seed=1), position
                ).dataset.take(len(whole))
            )
            for rank in range(workers)
        ]
        for steps, (expected,) in zip(zip(*shards, strict=True), whole, strict=True):
            for rank, element in enumerate(steps):
                parts, counts, _ = data.step_of(element, data.Sharding(workers, rank))
                ((*found,),) = _flat([parts[0]])
                own = [leaf[rank::workers] for leaf in expected]
                assert [leaf[: int(counts[0])] for leaf in found] == own


def test_a_zip_that_draws_seeded_numbers_or_holds_ragged_rows_is_left_alone() -> None:
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]]))
    assert joined(Pipeline.of(_zip((ragged.map(lambda row: row), _range())))) is None
    drawn = _range().map(lambda i: tf.random.uniform([], seed=3))
    assert joined(Pipeline.of(_zip((drawn, _range())))) is None
    assert joined(Pipeline.of(_zip((_generated(), _range())))) is None


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that Keras's functions open, by TensorFlow or by Python."""
    found: list[str] = []
    read, python_open = tf.io.read_file, open

    def note(path: Any) -> Any:
        found.append(Path(path.numpy().decode()).name)
        return path

    def noted(file: Any, *arguments: Any, **options: Any) -> Any:
        if Path(str(file)).suffix in (".png", ".txt"):
            found.append(Path(file).name)
        return python_open(file, *arguments, **options)

    monkeypatch.setattr(
        tf.io,
        "read_file",
        lambda path: read(tf.ensure_shape(tf.py_function(note, [path], tf.string), [])),
    )
    monkeypatch.setattr(builtins, "open", noted)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("directories")
    for i in range(N):
        for kind in ("images", "texts"):
            (folder / kind / str(i % 2)).mkdir(parents=True, exist_ok=True)
        pixels: np.ndarray = np.full([2, 2, 3], i, np.uint8)
        keras.utils.save_img(folder / f"images/{i % 2}/{i}.png", pixels, scale=False)
        (folder / f"texts/{i % 2}/{i}.txt").write_text(str(i))
    return folder


def _directory(folder: Path, kind: str, form: str) -> Any:
    options: dict[str, Any] = {"batch_size": B, "seed": 1, "format": form, "verbose": False}
    if kind == "images":
        return keras.utils.image_dataset_from_directory(
            folder / kind, image_size=(2, 2), label_mode="categorical", **options
        )
    return keras.utils.text_dataset_from_directory(folder / kind, **options)


def _as_older_keras(folder: Path) -> tf.data.Dataset:
    """Images and labels are zipped, then shuffled: Keras's own form until 3.10."""
    paths = tf.data.Dataset.from_tensor_slices([*map(str, sorted(folder.rglob("*.png")))])
    images = paths.map(lambda path: tf.io.decode_png(tf.io.read_file(path)), tf.data.AUTOTUNE)
    return tf.data.Dataset.zip((images, _range())).shuffle(9, seed=1).batch(B).prefetch(1)


DIRECTORIES: dict[str, Callable[[Path], Any]] = {
    "images": lambda folder: _directory(folder, "images", "tf"),
    "images by Grain": lambda folder: _directory(folder, "images", "grain"),
    "texts": lambda folder: _directory(folder, "texts", "tf"),
    "texts by Grain": lambda folder: _directory(folder, "texts", "grain"),
    "images, zipped": _as_older_keras,
}


@pytest.mark.parametrize("position", cases([3], [0]))
@pytest.mark.parametrize("name", DIRECTORIES)
def test_each_worker_opens_its_own_files_after_the_position(
    name: str, position: int, folder: Path, opened: list[str]
) -> None:
    files = []
    for rank in range(2):
        source = data.Source(DIRECTORIES[name](folder))
        shard = source.shard(data.Sharding(2, rank), data.SharedOrder(seed=3), position)
        opened.clear()
        assert list(shard.dataset)
        files.append(list(opened))
    left = N - position * B
    assert [len(names) for names in files] == [left // 2, left // 2]
    assert len({*files[0], *files[1]}) == left


@pytest.mark.parametrize("position", [0, 3])
def test_each_worker_cuts_its_own_windows_of_a_time_series(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[int] = []
    gather = tf.gather

    def noted(array: Any, indices: Any) -> Any:
        tf.py_function(lambda i: cut.append(int(np.ravel(i)[0])), [indices], [])
        return gather(array, indices)

    def series() -> tf.data.Dataset:
        with monkeypatch.context() as patch:
            patch.setattr(tf, "gather", noted)
            return keras.utils.timeseries_dataset_from_array(
                np.arange(N + 2), np.arange(N), 3, batch_size=B, shuffle=True, seed=5
            )

    whole = [np.asarray(y).tolist() for _, y in series()][position:]
    found: list[list[int]] = []
    for rank in range(2):
        source = data.Source(series())
        shard = source.shard(data.Sharding(2, rank), data.SharedOrder(seed=3), position)
        cut.clear()
        steps = list(shard.dataset)
        found += [parts[0][1][: int(counts[0])].numpy().tolist() for parts, counts, _ in steps]
        assert len(cut) == N - position * B  # of the data and of the targets
    half = len(found) // 2
    assert found[:half] == [batch[::2] for batch in whole]
    assert found[half:] == [batch[1::2] for batch in whole]
    alone = seek(data.ordered(Pipeline.of(series()), data.SharedOrder())[0], position)
    cut.clear()
    assert [np.asarray(y).tolist() for _, y in alone] == whole
    assert len(cut) == 2 * (N - position * B)


def test_zips_of_zips_keep_their_components() -> None:
    a, b, c = (tf.data.Dataset.from_tensor_slices([k, k + 1]) for k in (0, 10, 20))
    found = joined(Pipeline.of(tf.data.Dataset.zip((tf.data.Dataset.zip((a, b)), c))))
    assert found is not None
    assert list(found.dataset.as_numpy_iterator()) == [((0, 10), 20), ((1, 11), 21)]
