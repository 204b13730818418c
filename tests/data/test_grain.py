"""Grain's datasets, as of `image_dataset_from_directory(format="grain")`, on two workers."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.helpers.cluster import run_cluster

# Grain is in the group `dev`.
pytestmark = [pytest.mark.process, pytest.mark.nightly]


def test_grain_datasets_give_the_results_of_keras(tmp_path):
    random = np.random.default_rng(0)
    for label in ("cats", "dogs"):
        (tmp_path / label).mkdir()
        for number in range(11):
            pixels = random.integers(0, 255, (6, 6, 3)).astype(np.uint8)
            keras.utils.save_img(tmp_path / label / f"{number}.png", pixels)
    (alone,) = run_cluster("grain_fit.py", str(tmp_path), workers=1)
    assert set(alone) == {"MapDataset", "IterDataset", "DataLoader", "images"}
    for worker in run_cluster("grain_fit.py", str(tmp_path), workers=2):
        for name, expected in alone.items():
            assert len(set(expected["losses"])) == 3
            for what, value in expected.items():
                np.testing.assert_allclose(worker[name][what], value, rtol=2e-5, err_msg=name)
