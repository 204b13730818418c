"""Methods of a model's class, and wrappers of other libraries, around those of tfmw."""

from __future__ import annotations

import threading
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfmw
from tests.helpers.prepared import X, Y, prepared
from tfmw.compat import model_methods
from tfmw.train.calls import _Trainings


class Named(keras.Sequential):
    """Notes calls of its methods."""

    noted: list[Any]

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        self.noted.append(("fit", len(args), sorted(kwargs)))
        return super().fit(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        self.noted.append("predict")
        return super().predict(*args, **kwargs)


def named() -> Named:
    keras.utils.set_random_seed(1)
    model = Named([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.noted = []
    return model


def run_of(noted: list[Any]) -> Any:
    def run(**passed: Any) -> str:
        noted.append(("run", passed["epochs"], passed["batch_size"]))
        return "trained"

    return run


def others_of(noted: list[Any]) -> Any:
    def others(name: str, model: Any, *args: Any, **kwargs: Any) -> None:
        noted.append(("other", name))

    return others


@pytest.mark.parametrize("is_chief", [True, False])
def test_wrappers_run_on_the_chief_alone(monkeypatch: pytest.MonkeyPatch, is_chief: bool) -> None:
    """A wrapper's call there waits for no other worker, as MLflow's prediction of an example."""
    model = named()
    own = keras.Model.fit

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        model.noted.append("wrapper")
        model.noted.append(self.predict(X[:2], verbose=0).shape)
        return own(self, *args, **{**kwargs, "epochs": kwargs["epochs"] + 1})

    monkeypatch.setattr(keras.Model, "fit", wrapper)
    arguments = {"x": X, "y": Y, "epochs": 2, "batch_size": None, "backup_dir": "/x"}
    result = model_methods.call_method(
        model, "fit", arguments, (), run_of(model.noted), others_of(model.noted), is_chief
    )
    around = ["wrapper", "predict", (2, 1)] if is_chief else []
    assert result == "trained"
    assert model.noted == [("fit", 2, ["epochs"]), *around, ("run", 2 + is_chief, None)]
    assert keras.Model.fit is wrapper, "again, afterwards"


def test_methods_of_the_class_get_what_the_caller_passed() -> None:
    model = named()
    tfmw.fit(model, X, Y, 4, 1, 0, shuffle=False)
    assert model.noted.pop() == ("fit", 2, ["batch_size", "epochs", "shuffle", "verbose"])
    tfmw.predict(model, X, None, 0)
    assert model.noted == ["predict"]


def test_other_methods_are_tfmws_within_a_method_of_the_class() -> None:
    model: Any = named()
    noted: list[Any] = []

    def fit(x: Any) -> Any:
        noted.append("fit")
        model.evaluate(x)
        return keras.Model.fit(model, x)

    model.fit = fit  # of this object
    model_methods.call_method(model, "fit", {"x": X}, (), run_of(noted), others_of(noted))
    assert noted == ["fit", ("other", "evaluate"), ("run", 1, None)]


def test_keras_is_itself_in_other_threads() -> None:
    model: Any = named()
    noted: list[Any] = []

    def elsewhere() -> None:
        noted.append(prepared().fit(X, Y, epochs=1, shuffle=False, verbose=0).epoch)

    def fit(x: Any) -> Any:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return keras.Model.fit(model, x)

    model.fit = fit
    model_methods.call_method(model, "fit", {"x": X}, (), run_of(noted), others_of(noted))
    assert noted == [[0], ("run", 1, None)]


class TrainsTwice(keras.Sequential):
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        losses = super().fit(*args, **kwargs).history["loss"]
        return losses + super().fit(*args, **kwargs).history["loss"]


def test_backups_are_of_the_first_training(tmp_path: Path) -> None:
    def made() -> Any:
        keras.utils.set_random_seed(1)
        model = TrainsTwice([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-5), "mse")
        return model

    expected = made().fit(X, Y, shuffle=False, verbose=0)
    with pytest.warns(UserWarning, match=r"TrainsTwice\.fit trains more than once in this call"):
        losses = tfmw.fit(made(), X, Y, shuffle=False, verbose=0, backup_dir=tmp_path / "backups")
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_a_fit_that_never_calls_keras_is_warned_of() -> None:
    strategy = types.SimpleNamespace(num_replicas_in_sync=2)
    arguments: Any = types.SimpleNamespace(model=named(), strategy=strategy, export_dir=None)
    with pytest.warns(UserWarning, match=r"Named\.fit did not call super\(\)\.fit"):
        _Trainings(arguments).end()


def test_what_a_method_of_the_class_returns_is_returned() -> None:
    model: Any = named()
    model.fit = lambda x: {"trained on": len(x)}
    assert tfmw.fit(model, X) == {"trained on": 22}


class Foreign(type):
    """Makes types as an extension module may: without a module."""

    def __getattribute__(cls, name: str) -> Any:
        if name == "__module__":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Tokenizer(metaclass=Foreign):
    pass


def test_a_model_may_hold_objects_of_extension_modules() -> None:
    models = [prepared(), prepared()]
    models[1].tokenizer = Tokenizer()
    for model in models:
        tfmw.fit(model, X, Y, verbose=0)
    np.testing.assert_array_equal(*(model.get_weights()[0] for model in models))
