"""The main job on real processes: digits on two workers, with the numbers of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.cases import each
from tests.helpers.cluster import ONE_THREAD, PROGRAMS, PYTHONPATH, run_cluster

# `make test` has the demo, the README and the matrix.
pytestmark = [pytest.mark.process, pytest.mark.nightly]

PROGRAM = PROGRAMS / "train_digits.py"


@pytest.fixture(scope="module")
def reference():
    """Result of one process that runs model.fit."""
    run = subprocess.run(
        [sys.executable, PROGRAM, "reference"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": PYTHONPATH},
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def two_workers():
    return run_cluster("train_digits.py", "1", workers=2)


@pytest.fixture(scope="module")
def two_devices():
    return run_cluster("train_digits.py", "2", workers=1)


def assert_equal_to_one_process(result, reference):
    assert result["history"].keys() == reference["history"].keys()
    for name, values in reference["history"].items():
        np.testing.assert_allclose(result["history"][name], values, rtol=1e-4, err_msg=name)
    for mine, theirs in zip(result["weights"], reference["weights"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)


def test_two_workers_have_the_results_of_one_process(two_workers, reference):
    assert_equal_to_one_process(two_workers[0], reference)


def test_two_devices_have_the_results_of_one_process(two_devices, reference):
    assert_equal_to_one_process(two_devices[0], reference)


def test_workers_end_with_bitwise_equal_weights_and_logs(two_workers):
    assert two_workers[0]["sha"] == two_workers[1]["sha"]
    assert two_workers[0]["history"] == two_workers[1]["history"]


def test_every_example_once_per_epoch_in_an_unseeded_shuffle(two_workers, two_devices):
    for result in each((*two_workers, *two_devices)):
        assert result["not_once"] == [0.0, 0.0]


def test_only_the_chief_shows_progress(two_workers):
    assert "loss:" in two_workers.log("worker 0")
    assert "loss:" not in two_workers.log("worker 1")
