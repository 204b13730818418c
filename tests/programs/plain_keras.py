"""A script of plain Keras, unchanged: `plain_keras.py MODE FOLDER`.

MODE: all, twice, servers, own_shard, own_loop or off.
"""

import copy
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.programs._killed import KilledOnce

mode, folder = sys.argv[1], Path(sys.argv[2])
# So that unseeded numbers are not those of the seed below. They are equal on all workers.
drawn = [random.random(), float(np.random.rand()), float(keras.random.uniform([]))]
order = json.loads(os.environ.get("ORDER", "null")) or np.random.permutation(50).tolist()

keras.utils.set_random_seed(1)
X = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
numbers: dict[str, Any] = {}


def network(cls: Any = keras.Sequential) -> Any:
    model = cls([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


class Halved(keras.Sequential):
    """Prepares the data in `fit`, and has a step of its own."""

    def fit(self, x: Any, y: Any, **rest: Any) -> Any:
        history = super().fit(x / 2, y, **rest)
        history.history["after"] = self.evaluate(x, y, verbose=0)
        return history

    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), "one": 1.0}


class TrainsAnother(keras.callbacks.Callback):
    """Trains another model at the end of an epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        keras.utils.set_random_seed(3)
        loss = network().fit(X, Y, verbose=0).history["loss"]
        self.found = [loss, self.model.evaluate(X, Y, verbose=0)]


def train() -> keras.Model:
    model = network()
    options: dict[str, Any] = {"batch_size": 7, "verbose": 0}
    numbers["fit"] = model.fit(X, Y, epochs=2, validation_split=0.2, **options).history
    numbers["evaluate"] = model.evaluate(X, Y, **options)
    numbers["predict"] = model.predict(X, **options).tolist()
    return model


def everything() -> None:
    model = train()
    numbers["positional"] = model.fit(X, Y, 7, 1, 0).history
    for name in ("train_on_batch", "test_on_batch"):
        numbers[name] = [float(v) for v in getattr(model, name)(X[:9], Y[:9])]
    numbers["predict_on_batch"] = np.asarray(model.predict_on_batch(X[:9])).tolist()
    everywhere, on_chief = TrainsAnother(), TrainsAnother()
    on_chief.chief_only = True
    numbers["own fit"] = (
        network(Halved).fit(X, Y, callbacks=[everywhere, on_chief], verbose=0).history
    )
    numbers["in a callback"] = everywhere.found
    wrapper = keras.wrappers.SKLearnRegressor(network(), fit_kwargs={"epochs": 2, "verbose": 0})
    numbers["of scikit-learn"] = wrapper.fit(X, Y).predict(X).tolist()

    cloned = keras.models.clone_model(model)
    cloned.compile("sgd", "mse")
    part = keras.Sequential([keras.Input((4,)), model, keras.layers.Dense(1)])
    part.compile("sgd", "mse")
    model.save(folder / "model.keras")
    keras.saving.save_model(model, folder / "function.keras")
    model.export(folder / "exported", verbose=False)
    assert (folder / "exported" / "saved_model.pb").exists()  # for every worker
    numbers["deepcopy"] = copy.deepcopy(model).fit(X, Y, verbose=0).history
    for name, each in {
        "clone_model": cloned,
        "load_model": keras.models.load_model(folder / "model.keras"),
        "a model inside": part,
    }.items():
        numbers[name] = each.evaluate(X, Y, verbose=0)
    numbers["weights"] = [w.tolist() for w in model.get_weights()]


begun: list[int] = []  # epochs of the second training; an attribute would be restored


class InThirdEpoch(KilledOnce):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        begun.append(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            super().on_epoch_end(epoch, logs)


def twice() -> None:
    """Two trainings, on rows in an order without a seed; the second one is interrupted."""
    model, killed = network(), InThirdEpoch(str(folder))
    numbers["first"] = model.fit(X[order], Y[order], epochs=2, verbose=0).history
    numbers["second"] = model.fit(
        X[order] / 2, Y[order], batch_size=7, epochs=4, verbose=0, callbacks=[killed]
    ).history
    numbers["weights"] = [w.tolist() for w in model.get_weights()]


if mode == "all":
    everything()
elif mode == "twice":
    twice()
elif mode == "servers":
    train()
    network().train_on_batch(X[:9], Y[:9])
elif mode == "own_shard":
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    network().fit(X[index::2], Y[index::2], verbose=0)
elif mode == "own_loop":
    network()(X)
else:
    train()

if "TFMW_RESULT" in os.environ:
    from tests.programs import _result

    _result.write({"numbers": numbers, "drawn": drawn, "order": order, "begun": begun})
else:
    print(json.dumps(numbers))
