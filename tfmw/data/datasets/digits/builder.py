"""The TFDS builder of "tfmw_digits"; the data is a file beside this module."""

from __future__ import annotations

import contextlib
import csv
import gzip
import importlib.resources
import io
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from tfmw.data import datasets

# TFDS would write small data to one file; with several, workers can read different files.
_FILES_PER_SPLIT = 4

# Every fifth image is for testing: 360 of 1,797. The file is ordered by writer, so both splits have
# each writer and each digit, in the same proportions.
_TEST_EVERY = 5

_CITATION = """\
@misc{optical_recognition_of_handwritten_digits_80,
  author = {Alpaydin, E. and Kaynak, C.},
  title  = {{Optical Recognition of Handwritten Digits}},
  year   = {1998},
  howpublished = {UCI Machine Learning Repository},
  note   = {{DOI}: https://doi.org/10.24432/C50P49}
}
"""


class _Info(tfds.core.DatasetInfo):
    """A description without a search of TFDS's bucket, which leaves a temporary folder."""

    def initialize_from_bucket(self) -> None:
        """Does nothing: the description ships with the data."""


class TfmwDigits(tfds.core.GeneratorBasedBuilder):
    """The 1,797 handwritten digits of the UCI repository, 8x8 pixels, shipped with tfmw.

    They are the test set of "Optical Recognition of Handwritten Digits", E. Alpaydin, C. Kaynak,
    UCI Machine Learning Repository, 1998, doi 10.24432/C50P49, CC BY 4.0. Nothing is downloaded.

    Each example: `image` uint8 [8, 8, 1], ink from 0 to 16; `label` int64 [], 0 to 9; `id` int64
    [], the image's place in the original file, 0 to 1796. Splits: `train` 1,437, `test` 360, the
    same in every process; `train+test` reads them all.

    Args:
        data_dir: where the TFRecords are kept; `tfmw.datasets.default_data_dir()` by default.
        **kwargs: to `tfds.core.GeneratorBasedBuilder`.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "1,437 training images, 360 test images."}  # noqa: RUF012

    def __init__(self, *, data_dir: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        super().__init__(data_dir=os.fspath(data_dir or datasets.default_data_dir()), **kwargs)

    def download_and_prepare(
        self, *, download_config: tfds.download.DownloadConfig | None = None, **kwargs: Any
    ) -> None:
        """Writes the TFRecords, in several files, unless another process just did.

        Args:
            download_config: by default four files for each split.
            **kwargs: as in `tfds.core.DatasetBuilder.download_and_prepare`.
        """
        with _silence():
            super().download_and_prepare(
                download_config=download_config
                or tfds.download.DownloadConfig(
                    num_shards=_FILES_PER_SPLIT, try_download_gcs=False
                ),
                **kwargs,
            )

    def _info(self) -> tfds.core.DatasetInfo:
        return _Info(
            builder=self,
            description="Handwritten digits, 8x8 pixels, of the UCI Machine Learning Repository.",
            homepage="https://doi.org/10.24432/C50P49",
            citation=_CITATION,
            license="CC BY 4.0",
            supervised_keys=("image", "label"),
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                    "id": tfds.features.Scalar(dtype=np.int64),
                }
            ),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager  # nothing to download
        return {
            "train": self._generate_examples(test=False),
            "test": self._generate_examples(test=True),
        }

    def _generate_examples(self, test: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, (image, label) in enumerate(_read_file()):
            if (number % _TEST_EVERY == 0) is test:
                yield number, {"image": image, "label": label, "id": number}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hides the output of TFDS: a "download" of "unknown size", and four progress bars."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def _read_file() -> Iterator[tuple[np.ndarray, int]]:
    """Yields (image uint8 [8, 8, 1], label) in the order of the file; see ATTRIBUTION.md."""
    packed = importlib.resources.files(__package__).joinpath("digits.csv.gz").read_bytes()
    with gzip.open(io.BytesIO(packed), "rt", encoding="ascii", newline="") as text:
        for row in csv.reader(text):
            *pixels, label = (int(value) for value in row)
            yield np.array(pixels, np.uint8).reshape(8, 8, 1), label
