"""`keras.distribution` on the TensorFlow backend: its processes and devices are tfmw's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest

from tests.helpers.by_hand import free_addresses
from tests.helpers.cluster import ONE_THREAD, PROGRAMS, PYTHONPATH
from tests.programs import keras_distribution as program
from tfmw.cluster import joining, keras_distribution
from tfmw.errors import UsageError

keras_distribution.install()  # as `import tfmw` does after `import keras`


def run(mode: str, *environs: dict[str, str]) -> list[dict[str, Any]]:
    """The results of one process for each environment."""
    command = [sys.executable, str(PROGRAMS / "keras_distribution.py"), mode]
    own = {**os.environ, **ONE_THREAD, "PYTHONPATH": PYTHONPATH}
    processes = [
        subprocess.Popen(command, env=own | environ, stdout=subprocess.PIPE, text=True)
        for environ in environs
    ]
    outputs = [process.communicate(timeout=500)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(environs), outputs
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, values in expected["fit"].items():
        np.testing.assert_allclose(found["fit"][name], values, rtol=1e-5)
    np.testing.assert_allclose(found["python"], expected["python"], rtol=1e-5)
    np.testing.assert_allclose(found["evaluate"], expected["evaluate"], rtol=1e-5)
    np.testing.assert_allclose(found["predict"], expected["predict"], rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.process
def test_processes_that_keras_variables_describe_train_as_one() -> None:
    """The last batch has 5 rows, which two processes cannot divide evenly."""
    addresses = ",".join(free_addresses(2))
    environs = [
        {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": addresses,
            "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
            "KERAS_DISTRIBUTION_PROCESS_ID": str(index),
        }
        for index in range(2)
    ]
    both = run("workers", *environs)
    assert [each["process"] for each in both] == [[0, 2], [1, 2]]
    assert both[0]["devices"] == both[1]["devices"] == ["cpu:0", "cpu:1"]
    assert both[0]["replicas"] == 2
    assert both[0]["numbers"] == both[1]["numbers"]
    assert_equal(both[0]["numbers"], program.numbers(program.batches(program.X, 7)))
    own = (
        program.network()
        .fit(program.batches(program.X, 6), epochs=2, verbose=0, shuffle=False)
        .history
    )
    for name, values in own.items():
        np.testing.assert_allclose(both[0]["own part"][name], values, rtol=1e-5)
    fewer, model_parallel = both[1]["refused"]
    assert fewer.startswith(
        "received keras.distribution.DataParallel with 1 devices, and the cluster has 2"
    )
    assert model_parallel.startswith("received ModelParallel, and on the TensorFlow backend each")


@pytest.mark.nightly
@pytest.mark.process
def test_data_parallel_trains_on_all_devices_of_a_process() -> None:
    (found,) = run("devices", {})
    assert found["devices"] == ["cpu:0", "cpu:1"]
    assert (found["replicas"], found["process"]) == (2, [0, 1])
    assert_equal(found["numbers"], program.numbers(program.batches(program.X, 7)))


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The descriptions with which `init` is called."""
    seen: list[Any] = []
    monkeypatch.setattr(joining, "init", lambda cluster, keras: seen.append(cluster))
    for name in ("TF_CONFIG", "TFMW_TASK"):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_arguments_of_initialize_describe_the_cluster(
    joined: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keras.distribution.initialize()
    keras.distribution.initialize("h0:1", 1, 0)
    assert joined == [None, None]
    keras.distribution.initialize("h0:1, h1:2", process_id=1)
    task = {"type": "worker", "index": 1}
    assert joined[2] == {"cluster": {"worker": ["h0:1", "h1:2"]}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(joined[2]))
    keras.distribution.initialize(num_processes=2, process_id=1)
    assert joined[3] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h0:1", 2, 0), "expected the addresses of all processes"),
        (("h0:1,h1:2", 3, 0), "expected the addresses of all processes"),
        (("h0:1,h1:2", 2, None), "and the index of this one"),
        ((None, 2, 0), r"received num_processes=2, and .* has 1: leave it out, or start"),
        ((None, None, 1), r"received process_id=1, and .* has 0"),
    ],
)
def test_arguments_that_contradict_the_cluster_are_refused(
    joined: list[Any], arguments: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        keras.distribution.initialize(*arguments)
    assert joined == []


def test_in_one_process_there_is_one_device() -> None:
    assert keras.distribution.list_devices() == ["cpu:0"]
    assert keras_distribution.num_processes() == 1
    assert keras.distribution.DataParallel().num_model_replicas == 1
