"""TFDS data sets: each worker opens its own files, each example comes once per epoch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tests.helpers.cases import each
from tests.helpers.cluster import ClusterRun, run_cluster
from tfmw import UsageError, data

FILES = {"many": 5, "one": 1}
ALL = list(range(1, 104))
EXPECTED = {
    "own files": ALL,
    "in order": ALL,
    "one file": ALL,
}


class Numbers(tfds.core.GeneratorBasedBuilder):
    """The numbers from 1 to 103, with their remainders by 7 as labels."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        number = tfds.features.Scalar(tf.int64)
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"number": number, "label": number}),
            supervised_keys=("number", "label"),
        )

    def _split_generators(self, dl_manager: Any) -> Any:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Any:
        for i in ALL:
            yield i, {"number": i, "label": i % 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set in several files and in one, each in a folder."""
    folder = tmp_path_factory.mktemp("tfds")
    for name, files in FILES.items():
        config = tfds.download.DownloadConfig(num_shards=files)
        Numbers(data_dir=folder / name).download_and_prepare(download_config=config)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> ClusterRun:
    """Two workers; for the many files each has a copy of the data set without the other's."""
    return run_cluster("tfds_epochs.py", str(folder))


@pytest.mark.process
@pytest.mark.parametrize("name", EXPECTED)
def test_each_example_once_per_epoch(run: ClusterRun, name: str) -> None:
    for epoch in range(2):
        assert Counter(run[0][name][epoch] + run[1][name][epoch]) == Counter(EXPECTED[name])


@pytest.mark.process
def test_each_worker_opens_its_own_files_only(run: ClusterRun, folder: Path) -> None:
    """A worker reads three of five files though the others do not exist: it opened no other."""
    left = [len(list((folder / f"own {i}").rglob("*.tfrecord-*"))) for i in range(2)]
    assert left == [3, 2]
    assert min(len(run[i]["own files"][0]) for i in range(2)) > 30


@pytest.mark.process
def test_each_epoch_has_its_own_order(run: ClusterRun) -> None:
    for worker in each(run):
        assert worker["own files"][0] != worker["own files"][1]
        assert worker["in order"][0] == worker["in order"][1] != worker["own files"][0]


@pytest.mark.process
def test_fewer_files_than_workers(run: ClusterRun) -> None:
    shares = [len(worker["one file"][0]) for worker in run]
    assert sorted(shares) == [51, 52]
    parts = [
        run[0]["part of one file"][epoch] + run[1]["part of one file"][epoch] for epoch in (0, 1)
    ]
    assert sorted(parts[0]) == sorted(parts[1])
    assert len(set(parts[0])) == len(parts[0]) == 30
    assert [len(worker["one example"][0]) for worker in run] == [1, 0]


def _pass(folder: Path, workers: int, rank: int, passes: int = 1, **options: Any) -> list[int]:
    context = tf.distribute.InputContext(workers, rank, workers)
    dataset = data.tfds("numbers", "train", 12, data_dir=folder, **options)(context)
    return [int(i) for _ in range(passes) for x, _ in dataset for i in x]


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_any_number_of_workers(folder: Path, workers: int) -> None:
    for name in FILES:
        passes = [_pass(folder / name, workers, rank) for rank in range(workers)]
        assert sorted(i for part in passes for i in part) == ALL


def test_the_order_comes_from_the_seed(folder: Path) -> None:
    """Several passes are compared: a run that resumes from a backup draws their orders again."""
    first, again, other = (_pass(folder / "many", 2, 0, 3, seed=seed) for seed in (5, 5, 6))
    assert first == again != other


def test_examples_are_mapped(folder: Path) -> None:
    mapped = _pass(folder / "many", 1, 0, map=lambda x, y: (x + 1000, y))
    assert sorted(mapped) == [i + 1000 for i in ALL]


def test_files_are_shuffled_too(folder: Path) -> None:
    """A buffer of one example leaves only the order of the files to change."""
    where = folder / "many"
    assert _pass(where, 1, 0, shuffle=1) != _pass(where, 1, 0, shuffle=0)


def test_wrong_use_raises(folder: Path) -> None:
    with pytest.raises(UsageError, match="batch_size=0: expected"):
        data.tfds("numbers", "train", 0)
    with pytest.raises(UsageError, match="shuffle=True: expected"):
        data.tfds("numbers", "train", 8, shuffle=True)
    with pytest.raises(UsageError, match=r"with 5 replicas.*; use 10"):
        _pass(folder / "one", 5, 0)
    empty = data.tfds("numbers", "train[:0]", 8, data_dir=folder / "one")
    with pytest.raises(UsageError, match="is empty: expected examples"):
        empty(tf.distribute.InputContext())
