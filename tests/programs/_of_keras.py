"""Keras's own methods of models, which `tfmw run` replaces, also where a test compares both."""

import inspect
from typing import Any

import keras


def fit(model: keras.Model, *arguments: Any, **named: Any) -> Any:
    return inspect.unwrap(keras.Model.fit)(model, *arguments, **named)


def evaluate(model: keras.Model, *arguments: Any, **named: Any) -> Any:
    return inspect.unwrap(keras.Model.evaluate)(model, *arguments, **named)


def predict(model: keras.Model, *arguments: Any, **named: Any) -> Any:
    return inspect.unwrap(keras.Model.predict)(model, *arguments, **named)
