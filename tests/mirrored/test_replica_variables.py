"""Variables that Keras does not track, and optimizers that no step uses, on two devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.cluster import ONE_THREAD, PROGRAMS, PYTHONPATH


@pytest.fixture(scope="module")
def found() -> Any:
    environ = {**os.environ, **ONE_THREAD, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "replica_variables.py")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_draws_without_a_seed_differ_between_replicas_and_steps(found: Any) -> None:
    ours, keras = found["draws"], found["draws of Keras"]
    assert ours[0::4] == keras[0::4], "replica 0 draws as one process does"
    assert ours[0] == ours[2] != ours[1] == ours[3], "batches of 4, every other one of a replica"
    assert len(set(ours)) == 8, "2 calls of 2 steps on 2 replicas"


def test_pythons_generator_is_as_keras_leaves_it(found: Any) -> None:
    assert found["python"] == found["python of Keras"]


def test_variable_that_a_step_assigns_is_refused_by_its_attribute(found: Any) -> None:
    assert "'counts' of layer" in found["refused"]
    assert "add_weight" in found["refused"]
    assert found["counted"] == 2, "a callback may assign it: there is one process"


def test_default_optimizer_that_no_step_uses_stays_unbuilt(found: Any) -> None:
    assert found["own optimizer"] == 4
    assert found["default optimizer"] == 2, "as in Keras: iterations and learning rate"
    assert not found["needs build"], "no call traces the step again to build it"
