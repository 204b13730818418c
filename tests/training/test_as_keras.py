"""Regressions from Keras's own tests: fit, predict and callbacks behave as in Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfmw
from tests.helpers.cases import cases, chosen, each
from tests.helpers.cluster import ClusterRun, run_cluster

X = np.linspace(0, 1, 40, dtype="float32").reshape(20, 2)
Y = X.sum(axis=1, keepdims=True)


def network() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class Steps(keras.callbacks.Callback):
    """Counts the steps of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.epochs[-1] += 1


@pytest.mark.process
def test_an_epoch_of_arrays_begins_where_the_last_one_ended() -> None:
    """Ten batches, five for each epoch: the third epoch begins a new pass."""
    steps = Steps()
    tfmw.fit(
        network(), X, Y, batch_size=2, steps_per_epoch=5, epochs=4, callbacks=[steps], verbose=0
    )
    assert steps.epochs == [5, 5, 5, 5]


class AddsTwo(keras.Model):
    """Takes a tuple; would take its first member alone, too."""

    def call(self, inputs: Any) -> Any:
        return inputs[0] + inputs[1] if isinstance(inputs, tuple | list) else inputs


@pytest.mark.process
def test_inputs_that_are_a_tuple_are_all_inputs() -> None:
    predicted = tfmw.predict(AddsTwo(), (X, 10 * X), batch_size=8, verbose=0)
    np.testing.assert_allclose(predicted, 11 * X, rtol=1e-6)


class Interrupts(keras.callbacks.Callback):
    """Ends the first call of fit in its third epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise KeyboardInterrupt


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of Keras's own saving
def test_keras_backup_and_restore_sets_the_initial_epoch(tmp_path: Path) -> None:
    model, steps = network(), Steps()
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    options: dict[str, Any] = {"batch_size": 4, "epochs": 5, "verbose": 0}
    with pytest.raises(KeyboardInterrupt):
        tfmw.fit(model, X, Y, callbacks=[backup, Interrupts()], **options)
    history = tfmw.fit(model, X, Y, callbacks=[backup, steps], **options)
    assert history.epoch == [2, 3, 4]
    assert steps.epochs == [5, 5, 5]


class Sequence(keras.utils.PyDataset):
    """A dataset that gives its length by `num_batches` alone."""

    num_batches = 5

    def __getitem__(self, index: int) -> Any:
        part = slice(4 * index, 4 * index + 4)
        return X[part], Y[part]


@pytest.mark.process
def test_a_pydataset_without_a_length_is_shuffled() -> None:
    history = tfmw.fit(network(), Sequence(), epochs=2, verbose=0)
    assert len(history.epoch) == 2


# `make test` has the first ones on two workers; `make nightly` has the others, and all on devices.
SCENARIOS = ["orders_drawn_without_a_seed", "lengths_that_change"]
ON_WORKERS = ["noise_of_tensorflow"]  # replicas of one process have operations of their own
SCENARIOS_TOO = [
    "logs_computed_from_logs",
    "callbacks_see_an_ordinary_model",
    "generators_over_several_calls",
    "pipelines_that_keep_something",
    "a_fit_of_several_trainings",
    "a_fit_that_calls_tfmw",
    "predictions_without_one_shape",
    "order_resumed_within_an_epoch",
    "orders_of_several_calls",
    "replicas_without_an_example",
    "ragged_inputs",
    "whole_batches",
    "batches_of_several_shapes",
    "random_numbers_after_a_run",
    "stopping",
    "replicas_keep_seeds_of_their_own",
    "a_trained_layer",
    "sparse_inputs",
    "inputs_that_are_none",
    "read_by_threads",
    "limits",
    "validation_begins_anew",
    "orders_where_epochs_end_within_passes",
    "orders_of_seeds_that_set_seed_gives",
    "halves_of_one_order",
    "random_numbers_after_runs_on_other_data",
    "batch_numbers",
    "metrics_reset_by_a_callback",
    "swapped_moving_averages_of_weights",
    "moving_averages_resumed_within_an_epoch",
    "methods_of_the_class",
    "tasks_of_keras_hub",
]


pytestmark = pytest.mark.timeout(900)  # the fixtures run all scenarios that were chosen


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory, request: Any) -> dict[str, Any]:
    """Scenario -> result, of Keras in one process and of tfmw on two virtual devices."""
    folder = tmp_path_factory.mktemp("devices")
    names = chosen(request, "test_two_devices_do_as_keras_in_one_process")
    others = set(chosen(request, "test_two_workers_do_as_keras_in_one_process")) - set(names)
    run = run_cluster(
        *("as_keras.py", "devices", str(folder), *names, *REFUSED),
        *("by Keras alone", *sorted(others)),
        workers=1,
        timeout_s=850,
        env={"TFMW_NO_INIT": "1"},
    )
    return run[0]


REFUSED = ["states_of_examples", "batches_that_replicas_cannot_divide"]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, request: Any) -> ClusterRun:
    names = chosen(request, "test_two_workers_do_as_keras_in_one_process")
    folder = str(tmp_path_factory.mktemp("workers"))
    return run_cluster("as_keras.py", "workers", folder, *names, REFUSED[0], timeout_s=850)


def _assert_equal(got: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        got, expected = list(got.values()), list(expected.values())
    if isinstance(expected, list):
        assert isinstance(got, list), got
        assert len(got) == len(expected), f"{got} is not {expected}"
        for one, other in zip(got, expected, strict=True):
            _assert_equal(one, other)
    elif isinstance(expected, str):
        assert got == expected
    else:
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.process
@pytest.mark.parametrize("name", cases([], [*SCENARIOS, *SCENARIOS_TOO]))
def test_two_devices_do_as_keras_in_one_process(devices: dict[str, Any], name: str) -> None:
    assert not isinstance(devices["keras"][name], str), devices["keras"][name]
    _assert_equal(devices["tfmw"][name], devices["keras"][name])


@pytest.mark.process
@pytest.mark.parametrize("name", cases([*SCENARIOS, *ON_WORKERS], SCENARIOS_TOO))
def test_two_workers_do_as_keras_in_one_process(
    devices: dict[str, Any], workers: ClusterRun, name: str
) -> None:
    for task in each(workers):
        _assert_equal(task[name], devices["keras"][name])


@pytest.mark.process
def test_states_of_examples_need_one_replica(devices: dict[str, Any], workers: ClusterRun) -> None:
    assert devices["keras"]["states_of_examples"] == []
    for errors in (devices["tfmw"], *workers):
        for error in errors["states_of_examples"]:
            assert "stateful=True" in error
            assert "2 replicas divide each batch" in error
        assert len(errors["states_of_examples"]) == 6


@pytest.mark.process
def test_batches_that_replicas_cannot_divide(devices: dict[str, Any]) -> None:
    known, seen, shape = devices["tfmw"]["batches_that_replicas_cannot_divide"]
    for error in (known, seen):
        assert "a batch has 10 rows in element[0][1] and 8 in element[0][0], and" in error
        assert "pass split_batch=False: each replica then takes a whole batch." in error
    assert "each of 2 replicas had a part of the batch" in shape
    assert "pass split_batch=False" in shape
