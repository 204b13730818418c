"""Downloads of a script that all tasks run: `first_downloads.py ADDRESS CACHE KIND`.

The server counts events: `add` and `wait_for` let the tasks meet at the moments that matter.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kagglehub
import keras
import numpy as np
import tensorflow_datasets as tfds
from kagglehub import registry
from kagglehub.resolver import Resolver

from tests.programs import _result
from tests.programs._events import add, wait_briefly_for, wait_for

ADDRESS, CACHE, KIND = sys.argv[1:]
IS_FIRST = os.environ["TFMW_TASK"] == "worker 0"


def prepare() -> None:
    """Lasts until the other task has asked, and begins its own preparation, which it must not."""
    add("preparation")
    wait_for("asked", 2)
    wait_briefly_for("preparation", 2)


def numbers() -> Any:
    """Worker 1 asks for the file while worker 0 has half of it."""
    if not IS_FIRST:
        wait_for("half")
        add("asked")
    get_file = keras.datasets.cifar10.load_data.__globals__["get_file"]  # the name of each module
    path = get_file("numbers", f"{ADDRESS}/numbers", cache_dir=CACHE)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def archive() -> Any:
    """Worker 1 gets an archive while worker 0, which has changed the files, reads them."""
    found = []
    for turn in ("first", "second"):
        if not IS_FIRST:
            wait_for(f"{turn}_changed")
        folder = Path(
            keras.utils.get_file("files.tar", f"{ADDRESS}/files", cache_dir=CACHE, extract=True)
        )
        files = sorted(folder.glob("*.txt"))
        found.append([file.name for file in files])
        if IS_FIRST:
            files[0].unlink()
            add(f"{turn}_changed")
            wait_for(f"{turn}_read")
        add(f"{turn}_read")
    return found


class Numbers(tfds.core.GeneratorBasedBuilder):
    """A dataset whose preparation lasts until both tasks have asked for it."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"x": tfds.features.Scalar(dtype=np.int64)})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        prepare()
        for number in range(40):
            yield number, {"x": number}


def dataset() -> Any:
    add("asked")
    examples = tfds.load("numbers", split="train", data_dir=CACHE)
    return [sum(int(example["x"]) for example in examples), random.random()]


class Store(Resolver):
    """A store of models that writes its file as KaggleHub does."""

    def is_supported(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def _resolve(self, *args: Any, **kwargs: Any) -> tuple[str, int]:
        file = Path(CACHE, "model")
        if not file.exists() or not file.stat().st_size:
            with file.open("a") as model:
                model.write("weights")
                prepare()
                model.write(" of a model")
        return str(file), 1


def model() -> Any:
    os.environ["KAGGLEHUB_CACHE"] = f"{CACHE}/kagglehub"
    registry.model_resolver.add_implementation(Store())
    add("asked")
    return Path(kagglehub.model_download("owner/model/keras/tiny")).read_text()


_result.write({"found": globals()[KIND]()})
