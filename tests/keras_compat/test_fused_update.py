"""The compiled update: the weights, slots and counters of Keras's own, and when it is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import every
from tfmw.compat import local_updates, optimizers
from tfmw.compat.local_updates import FUSED_UPDATE, MIN_BYTES, fuses
from tfmw.errors import UsageError

o = keras.optimizers
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: o.SGD(0.1),
    "SGD, Nesterov": lambda: o.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: o.Adam(),
    "Adam, amsgrad": lambda: o.Adam(amsgrad=True),
    "Adam, schedule": lambda: o.Adam(o.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "AdamW": lambda: o.AdamW(weight_decay=0.1),
    "Adamax": lambda: o.Adamax(),
    "Nadam": lambda: o.Nadam(),
    "RMSprop, centered": lambda: o.RMSprop(momentum=0.9, centered=True),
    "Adagrad": lambda: o.Adagrad(),
    "Adadelta": lambda: o.Adadelta(0.5),
    "Ftrl": lambda: o.Ftrl(),
    "Lion": lambda: o.Lion(),
    "Lamb": lambda: o.Lamb(),
    "Adafactor": lambda: o.Adafactor(),
    "clipnorm": lambda: o.Adam(clipnorm=0.5),
    "clipvalue": lambda: o.Adam(clipvalue=0.1),
    "global_clipnorm": lambda: o.SGD(0.1, global_clipnorm=0.5),
    "average of weights": lambda: o.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulated gradients": lambda: o.Adam(gradient_accumulation_steps=2),
    "loss scaling": lambda: o.LossScaleOptimizer(o.Adam(), initial_scale=8.0),
}
SHAPES = [(7, 5), (5,), (5, 3)]
STEPS = 5


def updated(make: Callable[[], Any], monkeypatch: Any, choice: str) -> tuple[list[Any], set[str]]:
    """(all variables after some updates, whether they were traced in `update` or as they are)."""
    monkeypatch.setenv(FUSED_UPDATE, choice)
    random = np.random.default_rng(0)
    weights = [keras.Variable(random.normal(size=s).astype("float32")) for s in SHAPES]
    gradients = random.normal(size=(STEPS, sum(map(np.prod, SHAPES)))).astype("float32")
    optimizer = make()
    optimizer.build(weights)
    update_step, traced = optimizer.update_step, set()

    def noted(*args: Any, **kwargs: Any) -> None:
        graph, names = tf.compat.v1.get_default_graph(), []
        while graph is not None:
            names.append(getattr(graph, "name", ""))  # of a function's graph
            graph = getattr(graph, "outer_graph", None)
        traced.add("update" if any(name.startswith("update") for name in names) else "plain")
        update_step(*args, **kwargs)

    inner = list(optimizers.with_inner_optimizers(optimizer))[-1]
    update_step, inner.update_step = inner.update_step, noted

    @tf.function(autograph=False)
    def step(flat: tf.Tensor) -> None:
        parts = tf.split(flat, [int(np.prod(s)) for s in SHAPES])
        optimizer.apply([tf.reshape(p, s) for p, s in zip(parts, SHAPES, strict=True)], weights)

    with local_updates.fused_update(optimizer, weights):
        for flat in gradients:
            step(tf.constant(flat))
    return [np.asarray(v.value) for v in [*weights, *optimizer.variables]], traced


@pytest.mark.process
@pytest.mark.parametrize("name", every(4, OPTIMIZERS))
def test_fused_update_equals_keras(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plain_graphs = updated(OPTIMIZERS[name], monkeypatch, "off")
    fused, fused_graphs = updated(OPTIMIZERS[name], monkeypatch, "on")
    assert plain_graphs == {"plain"}
    assert fused_graphs == {"update"}
    for ours, keras_s in zip(fused, plain, strict=True):
        np.testing.assert_allclose(ours, keras_s, rtol=2e-6, atol=2e-7)
    assert any(np.abs(v).max() > 0 for v in fused)


def test_rows_of_sparse_gradients_are_updated_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FUSED_UPDATE, "on")
    table = keras.Variable(np.ones([10, 2], "float32"))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([table])

    @tf.function(autograph=False)
    def step(rows: tf.Tensor) -> None:
        gradient = tf.IndexedSlices(tf.ones([tf.size(rows), 2]), rows, tf.constant([10, 2]))
        optimizer.apply([gradient], [table])

    with local_updates.fused_update(optimizer, [table]):
        step(tf.constant([3, 4]))
    assert np.flatnonzero(np.asarray(table.value)[:, 0] == 0).tolist() == [3, 4]


class Own(keras.optimizers.SGD):
    """A user's class."""


def test_which_updates_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [keras.Variable(np.zeros(3, "float32"))]
    large = [keras.Variable(np.zeros(MIN_BYTES // 4, "float32"))]
    adam, own = keras.optimizers.Adam(), Own()
    assert fuses(adam, large)
    assert not fuses(adam, small)
    assert not fuses(own, large)
    assert not fuses(keras.optimizers.LossScaleOptimizer(own), large)
    assert not fuses(adam, [])
    monkeypatch.setenv(FUSED_UPDATE, "on")
    assert fuses(adam, small)
    monkeypatch.setenv(FUSED_UPDATE, "off")
    assert not fuses(adam, large)


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FUSED_UPDATE, "yes")
    with pytest.raises(UsageError, match="unknown TFMW_FUSED_UPDATE 'yes': expected one of 'auto'"):
        fuses(keras.optimizers.Adam(), [])
