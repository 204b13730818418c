"""The update, sharded over workers: the weights and the state of the one that each makes itself."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from tests.helpers.cases import cases, chosen
from tests.helpers.cluster import ONE_THREAD, run_cluster
from tfmw.compat import optimizer_part, optimizers
from tfmw.errors import UsageError
from tfmw.train.mirrored.sharded_update import SHARD_OPTIMIZER, ShardedUpdate

o = keras.optimizers

# Optimizer | whether the update is compiled. Equal to the last bit for any number of workers.
BY_ELEMENT = [
    "SGD, Nesterov | off",
    "Adam | on",
    "Adam, amsgrad | off",
    "AdamW | on",
    "Adamax | off",
    "Nadam | on",
    "RMSprop, centered | on",
    "Adagrad | on",
    "Lion | off",
    "clipvalue | off",
    "average of weights | off",
    "accumulated gradients | on",
    "loss scaling | on",
]
# Whole variables are summed in another order than packs, with more than two workers.
BY_VARIABLE = [
    "Adadelta | off",
    "Ftrl | off",
    "Lamb | off",
    "Adafactor | off",
    "clipnorm | on",
    "user's update | off",
]
ROUNDED = ["global_clipnorm | on", "loss scaling, global_clipnorm | off"]
BY_EACH = {
    "user's apply | off": "on every worker (OwnApply has its own apply)",
    "own step": "on every worker (the step updates some of the variables at a time)",
}
ASSIGNED = ["assigned by a layer", "assigned after the update"]
MODELS = ["constraint", "sparse", "compiled model", "16 bits", "between steps", *ASSIGNED]


OFTEN = ["Adam | on", "sparse", "between steps"]
SHARED = [*BY_ELEMENT, *BY_VARIABLE, *MODELS]


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> Any:
    shared = chosen(request, "test_two_workers_share_it_to_the_last_bit")
    rounded = chosen(request, "test_a_norm_of_all_gradients_is_summed_over_workers")
    names = list(dict.fromkeys([*shared, "between steps", *rounded, *BY_EACH]))
    return run_cluster("sharded_update.py", *names, env=ONE_THREAD, timeout_s=600)


@pytest.fixture(scope="module")
def three() -> Any:
    names = ["Adam | on", "Lamb | off"]
    return run_cluster("sharded_update.py", *names, workers=3, env=ONE_THREAD, timeout_s=600)


def _same(run: Any, name: str) -> tuple[Any, Any]:
    """(what each worker updated, what all shared), the same on all workers."""
    assert len({(task[name][1]["weights"], task[name][1]["state"]) for task in run}) == 1
    plain, shared = run[0][name]
    assert plain["update"] == "on every worker (shard_optimizer=False)"
    assert np.ptp(shared["values"][0]) > 0
    return plain, shared


@pytest.mark.process
@pytest.mark.parametrize("name", cases(OFTEN, [name for name in SHARED if name not in OFTEN]))
def test_two_workers_share_it_to_the_last_bit(two: Any, name: str) -> None:
    plain, shared = _same(two, name)
    assert shared["update"] == "sharded over 2 workers"
    assert shared["weights"] == plain["weights"]
    assert shared["state"] == plain["state"]
    assert shared.get("seen") == plain.get("seen")


@pytest.mark.process
def test_callbacks_between_steps_see_the_whole_state(two: Any) -> None:
    _, shared = _same(two, "between steps")
    assert len(shared["seen"]) > 1


@pytest.mark.process
@pytest.mark.parametrize("name", cases(ROUNDED[:1], ROUNDED[1:]))
def test_a_norm_of_all_gradients_is_summed_over_workers(two: Any, name: str) -> None:
    plain, shared = _same(two, name)
    assert shared["update"] == "sharded over 2 workers"
    for ours, wanted in zip(shared["values"], plain["values"], strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.process
@pytest.mark.parametrize(("name", "why"), BY_EACH.items())
def test_each_worker_updates_all_where_an_optimizer_must_see_all(
    two: Any, name: str, why: str
) -> None:
    plain, shared = _same(two, name)
    assert shared["update"] == why
    assert shared["weights"] == plain["weights"]
    assert f"updates the weights {why}" in two.log("worker 0")


@pytest.mark.process
@pytest.mark.nightly
def test_three_workers_share_it_to_the_last_bit(three: Any) -> None:
    plain, shared = _same(three, "Adam | on")
    assert shared["update"] == "sharded over 3 workers"
    assert (shared["weights"], shared["state"]) == (plain["weights"], plain["state"])


@pytest.mark.process
@pytest.mark.nightly
def test_three_workers_share_whole_variables(three: Any) -> None:
    plain, shared = _same(three, "Lamb | off")
    assert shared["update"] == "sharded over 3 workers"
    for ours, wanted in zip(shared["values"], plain["values"], strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def two_machines() -> Any:
    names = ["Adam | on", "Nadam | on", "constraint", "sparse"]
    env = {**ONE_THREAD, "MACHINES": "2"}
    return run_cluster("sharded_update.py", *names, workers=4, env=env, timeout_s=600)


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Adam | on", "Nadam | on", "constraint", "sparse"])
def test_workers_of_two_machines_share_it_to_the_last_bit(two_machines: Any, name: str) -> None:
    assert two_machines[0]["ring"] == "HierarchicalRing"
    plain, shared = _same(two_machines, name)
    assert shared["update"] == "sharded over 4 workers"
    assert (shared["weights"], shared["state"]) == (plain["weights"], plain["state"])


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["constraint", "sparse"])
def test_two_levels_of_sums_differ_from_one_by_rounding(
    two: Any, two_machines: Any, name: str
) -> None:
    assert two[0]["ring"] == "Ring"
    for ours, wanted in zip(
        _same(two_machines, name)[1]["values"], _same(two, name)[1]["values"], strict=True
    ):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- which optimizers may


def _built(optimizer: Any) -> Any:
    optimizer.build([keras.Variable(np.zeros([3, 2], "f")), keras.Variable(np.zeros([2], "f"))])
    return optimizer


class OwnBuild(keras.optimizers.SGD):
    def build(self, variables: Any) -> None:
        super().build(variables)


class OwnStep(keras.optimizers.Adam):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: o.Adam(), None),
        (lambda: o.LossScaleOptimizer(o.Lamb()), None),
        (lambda: OwnStep(), None),
        (lambda: OwnBuild(), "OwnBuild has its own build"),
        (lambda: o.LossScaleOptimizer(OwnBuild()), "OwnBuild has its own build"),
        (
            lambda: o.SGD(global_clipnorm=1.0, gradient_accumulation_steps=2),
            "global_clipnorm looks at accumulated gradients",
        ),
    ],
)
def test_who_must_see_all_variables(make: Callable[[], Any], why: str | None) -> None:
    assert optimizers.refuses_parts(_built(make())) == why


def test_who_may_see_elements() -> None:
    free = keras.Variable(np.zeros([3], "f"))
    bound = keras.Variable(np.zeros([3], "f"))
    bound.constraint = keras.constraints.NonNeg()
    asks = optimizers.updated_by_element
    assert asks(o.Adam(), free, False)
    assert asks(o.LossScaleOptimizer(o.AdamW()), free, False)
    assert asks(o.RMSprop(), free, True)
    assert not asks(o.RMSprop(), free, False)
    assert not asks(o.Adam(), bound, True)
    assert not asks(o.Adam(clipnorm=1.0), free, True)
    assert not asks(o.Lamb(), free, True)
    assert not asks(OwnStep(), free, True)


def test_a_lost_state_is_refused() -> None:
    adam = _built(o.Adam(name="adam"))
    optimizer_part.refuse_empty(adam)
    part = optimizer_part.OptimizerPart(adam, {0: slice(0, 2)}, {0, 1})
    part.take()
    with pytest.raises(UsageError, match="the state of the optimizer 'adam' was lost when the"):
        optimizer_part.refuse_empty(adam)


def test_an_unknown_choice_is_refused() -> None:
    import tfmw

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(
        UsageError, match="unknown shard_optimizer 'yes': expected one of True, False"
    ):
        tfmw.fit(model, np.zeros([4, 2]), np.zeros([4]), shard_optimizer="yes")


OVER_RING: Any = types.SimpleNamespace(
    transport=types.SimpleNamespace(size=2, whole_sums=False), wire_dtype=None
)


@pytest.mark.parametrize(
    ("value", "why"),
    [("auto", "0.0 MB of weights are few"), ("on", None), ("off", "shard_optimizer=False")],
)
def test_the_environment_says_what_auto_is(
    monkeypatch: pytest.MonkeyPatch, value: str, why: str | None
) -> None:
    monkeypatch.setenv(SHARD_OPTIMIZER, value)
    assert ShardedUpdate(_built(o.Adam()), OVER_RING, "auto").reason == why
    assert ShardedUpdate(_built(o.Adam()), OVER_RING, True).reason is None
    assert ShardedUpdate(_built(o.Adam()), OVER_RING, False).reason == "shard_optimizer=False"


def test_a_wrong_choice_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARD_OPTIMIZER, "yes")
    with pytest.raises(UsageError, match="TFMW_SHARD_OPTIMIZER is 'yes': expected auto, on or off"):
        ShardedUpdate(_built(o.Adam()), OVER_RING, "auto")
