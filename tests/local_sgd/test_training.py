"""Local SGD and DiLoCo through `tfmw.fit`: two workers, two virtual devices, one replica."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import tfmw
from tests.helpers.cases import cases, each
from tests.helpers.cluster import run_cluster
from tests.programs import local_sgd
from tests.programs.local_sgd import DILOCO, TWICE, X, Y, made
from tfmw.errors import UsageError

SGD = keras.optimizers.SGD


@pytest.fixture(scope="module")
def workers() -> list[Any]:
    return list(run_cluster("local_sgd.py", workers=2))


@pytest.fixture(scope="module")
def more() -> list[Any]:
    """Two workers that train in more ways."""
    return list(run_cluster("local_sgd.py", "--more", workers=2))


@pytest.fixture(scope="module")
def devices() -> list[Any]:
    return list(run_cluster("local_sgd.py", "--devices", workers=1))


@pytest.fixture(params=cases(["workers"], ["more", "devices"]))
def tasks(request: pytest.FixtureRequest) -> list[Any]:
    found: list[Any] = request.getfixturevalue(request.param)
    return found


def of(tasks: list[Any], name: str) -> Any:
    return tasks[0]["found"][name]


def distance(one: Any, other: Any) -> float:
    return max(
        float(np.abs(np.subtract(a, b)).max())
        for a, b in zip(one["weights"], other["weights"], strict=True)
    )


@pytest.mark.process
def test_a_round_after_each_step_of_sgd_is_synchronous_sgd(tasks):
    ours, expected = of(tasks, "each step"), of(tasks, "synchronous")
    assert distance(ours, expected) < 1e-6
    for name, values in expected["history"].items():
        np.testing.assert_allclose(ours["history"][name], values, rtol=1e-5)


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.parametrize("ways", ["more", "devices"])
def test_workers_with_the_same_examples_train_as_one_process_does(ways, request):
    model = made(SGD(0.05, momentum=0.9), norm=False)
    x, y = (a[::2] for a in TWICE)
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    ours = of(request.getfixturevalue(ways), "alike")
    assert distance(ours, {"weights": model.get_weights()}) < 1e-6


@pytest.mark.process
def test_metrics_of_an_epoch_are_sums_over_all_examples(tasks):
    history = of(tasks, "no rate")["history"]
    expected = made(SGD(0.0), norm=False).evaluate(X, Y, verbose=0)
    for kind in ("", "val_"):
        np.testing.assert_allclose(history[f"{kind}loss"], [expected[0]] * 2, rtol=1e-5)
        np.testing.assert_allclose(history[f"{kind}mae"], [expected[1]] * 2, rtol=1e-5)


@pytest.mark.process
@pytest.mark.parametrize("ways", cases(["workers"], ["more"]))
def test_all_replicas_have_the_common_weights_at_the_end_of_an_epoch(ways, request):
    chief, *others = request.getfixturevalue(ways)
    for name, chiefs in each(chief["found"].items()):
        for task in each(others):
            assert task["found"][name]["digest"] == chiefs["digest"], name
            assert task["found"][name]["at epoch ends"] == chiefs["at epoch ends"], name
            assert task["found"][name]["history"] == chiefs["history"], name


@pytest.mark.process
def test_workers_without_examples_make_no_update(tasks):
    # The chief has an example in each of 8 batches; the last batch has only that one.
    assert of(tasks, "streaming")["iterations"] == 2 * 8
    assert tasks[-1]["found"]["streaming"]["iterations"] == 2 * (8 if len(tasks) == 1 else 7)


@pytest.mark.process
def test_each_way_of_exchanging_learns(tasks):
    first = of(tasks, "no rate")["history"]["val_loss"][0]
    for name, found in each(tasks[0]["found"].items()):
        limit = 0.99 if found["rate"] == pytest.approx(0.001) else 0.5  # Adam begins slowly
        if name not in ("no rate", "alike"):
            assert found["history"]["val_loss"][-1] < limit * first, name


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_differences_are_close_to_exact_ones(more, bits):
    exact = of(more, "float32")
    off_by = distance(of(more, f"int{bits}"), exact)
    least, most = (0, 2e-3) if bits == 8 else (distance(of(more, "int8"), exact), 3e-2)
    assert least < off_by < most


@pytest.mark.process
def test_what_cannot_be_is_refused_on_all_tasks(tasks):
    for task in tasks:
        said = task["refused"]
        assert "the model has 4 weights" in said["too many fragments"]
        assert "use_ema=True" in said["averages"]
        assert "expected two machines or more" in said["one machine"]
    if len(tasks) == 1:
        assert "tfmw's own ring" in tasks[0]["refused"]["int8 without a ring"]


# ---------------------------------------------------------------- machines of two workers


@pytest.fixture(scope="module")
def machines() -> list[Any]:
    return list(run_cluster("local_sgd.py", "--machines", "abab", workers=4))


@pytest.mark.process
@pytest.mark.nightly
def test_the_replicas_of_a_machine_train_as_one(machines, more):
    """Example j of a batch goes to replica j mod 4: machine a has those of worker 0 of two."""
    assert distance(of(machines, "mean"), of(more, "float32")) < 1e-6
    assert distance(of(machines, "compiled"), of(more, "float32")) < 1e-6
    assert [task["found"]["mean"]["iterations"] for task in machines] == [16, 14, 16, 14]
    assert distance(of(machines, "mean"), of(machines, "of each replica")) > 1e-4


@pytest.mark.process
@pytest.mark.nightly
def test_machines_that_meet_after_each_step_of_sgd_train_synchronously(machines):
    assert distance(of(machines, "each step"), of(machines, "synchronous")) < 1e-6


@pytest.mark.process
@pytest.mark.nightly
def test_values_are_rounded_between_machines_only(machines):
    for name, exact in (("int8", "mean"), ("int8 of each replica", "of each replica")):
        assert 0 < distance(of(machines, name), of(machines, exact)) < 2e-3


@pytest.mark.process
@pytest.mark.nightly
def test_all_workers_of_all_machines_have_the_common_weights(machines):
    for name, chiefs in each(machines[0]["found"].items()):
        for task in each(machines[1:]):
            assert task["found"][name]["digest"] == chiefs["digest"], name
            assert task["found"][name]["history"] == chiefs["history"], name


# ---------------------------------------------------------------- one replica


def alone(**options: Any) -> keras.Model:
    model = made(SGD(0.05), norm=False)
    options = {"batch_size": 17, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    tfmw.fit(model, X, Y, **options)
    return model


def test_one_replica_with_the_mean_trains_as_keras_does():
    model = made(SGD(0.05), norm=False)
    model.fit(X, Y, batch_size=17, epochs=2, shuffle=False, verbose=0)
    for ours, expected in zip(
        alone(sync=tfmw.LocalSGD(3)).get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, expected, atol=1e-6)


def test_one_replica_with_an_outer_optimizer_is_that_algorithm_by_hand():
    model = made(SGD(0.05), norm=False)
    common = model.get_weights()
    speed = [np.zeros_like(w) for w in common]
    for _ in range(2):
        for i in range(8):
            rows = slice(17 * i, 17 * i + 17)
            model.train_on_batch(X[rows], Y[rows])
            if (i + 1) % 3 and i != 7:
                continue
            grads = [c - w for c, w in zip(common, model.get_weights(), strict=True)]
            speed = [0.9 * s - 0.7 * g for s, g in zip(speed, grads, strict=True)]
            common = [c + 0.9 * s - 0.7 * g for c, s, g in zip(common, speed, grads, strict=True)]
            model.set_weights(common)
    ours = alone(sync=tfmw.DiLoCo(3, outer_optimizer=DILOCO)).get_weights()
    for weights, expected in zip(ours, common, strict=True):
        np.testing.assert_allclose(weights, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every": 0}, "every=0: expected a whole number from 1"),
        ({"every": 2.5}, r"every=2\.5"),
        ({"every": 4, "overlap": 4}, r"fewer than every // fragments = 4"),
        ({"every": 2, "fragments": 3}, "one fragment for each step"),
        ({"every": 2, "compression": "int2"}, "one of None, 'int8', 'int4'"),
        ({"every": 2, "between": "hosts"}, "one of 'replicas', 'machines'"),
        ({"every": 2, "outer_optimizer": 3}, "one of keras.optimizers"),
    ],
)
def test_wrong_settings_are_refused_when_they_are_made(settings, said):
    with pytest.raises(UsageError, match=said):
        tfmw.DiLoCo(**settings)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gradient_compression": "bf16"}, 'compression="int8" of sync'),
        ({"shard_optimizer": True}, "shard_optimizer=True"),
        ({"sync": 50}, r"sync=50: expected tfmw\.LocalSGD\(every=50\)"),
    ],
)
def test_wrong_arguments_are_refused_before_any_process_starts(options, said):
    with pytest.raises(UsageError, match=said):
        tfmw.fit(made("sgd", norm=False), X, Y, workers=2, **{"sync": tfmw.LocalSGD(2), **options})


def test_an_unknown_argument_is_an_error_as_in_keras():
    with pytest.raises(TypeError, match="unexpected keyword argument 'sync_evry'"):
        tfmw.fit(made("sgd", norm=False), X, Y, sync_evry=2)
    with pytest.raises(TypeError, match=r"'epoch'\. Did you mean 'epochs'\?"):
        tfmw.fit(made("sgd", norm=False), X, Y, epoch=2)


def test_synchronized_norms_are_refused():
    layers = [keras.Input((6,)), keras.layers.BatchNormalization(synchronized=True)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(UsageError, match="synchronized=True"):
        tfmw.fit(model, X, Y, verbose=0, sync=tfmw.LocalSGD(2))


def test_batches_of_the_program_are_uneven():
    assert len(X) % 17 == 1
    assert local_sgd.X is X
