"""A sample of `tests.keras_compat.survey`: items that Keras exports, on two replicas and on one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers import cluster
from tfmw.launcher.environment import compute_with_onednn

SAMPLE = (
    "SparseCategoricalCrossentropy in a layer, by add_loss",
    "Circle",
    "Sum of one number",
    "R2Score",
    "Nadam",
)


@pytest.mark.nightly
def test_no_silent_difference_in_a_sample() -> None:
    environ = {**os.environ, **cluster.ONE_THREAD, "PYTHONPATH": cluster.PYTHONPATH}
    environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    compute_with_onednn(environ)
    found = subprocess.run(
        [sys.executable, "-m", "tests.keras_compat.survey", "--print-only", *SAMPLE],
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]
    verdicts = [line.split()[0] for line in found.stdout.splitlines()[:-1]]
    assert sorted(set(verdicts)) == ["equal", "warned"], found.stdout
