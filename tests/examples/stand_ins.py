"""Small substitutes for large data, randomness and libraries that are missing here."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

EPOCHS = 2
BATCH = 16
TRAIN, TEST = 61, 21  # examples of a data set: the last batch is smaller, and odd

# Imported at the top of examples, for downloads and pictures.
ABSENT = (
    "IPython",
    "conlleval",
    "datasets",
    "gdown",
    "imageio",
    "ipywidgets",
    "sklearn",
    "cv2",
    "tensorflow_docs",
)

WORDS = ["the", "cat", "sat", "on", "mat", "then", "it", "ran", "to", "see", "old", "dog", "house"]


def images(number: int, shape: Sequence[int], seed: int = 0) -> np.ndarray[Any, Any]:
    """Pictures with values of 0 to 255: uint8 [number, *shape]."""
    return np.random.default_rng(seed).integers(0, 256, (number, *shape)).astype("uint8")


def labels(number: int, classes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Every class, as far as the number allows: int64 [number]."""
    return np.random.default_rng(seed).permutation(np.arange(number) % classes)


def sentences(number: int, seed: int = 0) -> list[str]:
    """Sentences of 4 to 12 words."""
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(4, 13))) for _ in range(number)]


def labelled_images(
    number: int, shape: Sequence[int], classes: int, seed: int = 0
) -> tf.data.Dataset:
    """A dataset of pictures and their classes, not batched."""
    return tf.data.Dataset.from_tensor_slices(
        (images(number, shape, seed), labels(number, classes, seed))
    )


def take_place() -> None:
    """Replaces data, chance and what is absent, in this process."""
    os.environ["MPLBACKEND"] = "agg"
    sys.meta_path.append(_Absent())
    keras.utils.plot_model = mock.MagicMock()
    # TensorFlow has no top-k of float64.
    keras.metrics.TopKCategoricalAccuracy = _top_1(keras.metrics.CategoricalAccuracy)
    keras.metrics.SparseTopKCategoricalAccuracy = _top_1(keras.metrics.SparseCategoricalAccuracy)
    _data_sets()
    _no_chance()
    _untrained_applications()


def _top_1(metric: type[Any]) -> Callable[..., Any]:
    return lambda k=5, **kwargs: metric(**kwargs)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that are not here, as objects that answer everything."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _data_sets() -> None:
    def pictures(shape: tuple[int, ...], classes: int, column: bool) -> Callable[..., Any]:
        def load_data(*_: Any, **__: Any) -> Any:
            parts = []
            for seed, number in enumerate((TRAIN, TEST)):
                y = labels(number, classes, seed)
                parts.append((images(number, shape, seed), y[:, None] if column else y))
            return tuple(parts)

        return load_data

    def reviews(num_words: int = 500, **_: Any) -> Any:
        random = np.random.default_rng(0)
        parts = []
        for number in (TRAIN, TEST):
            x: Any = np.empty(number, object)
            x[:] = [list(random.integers(1, num_words, random.integers(5, 40))) for _ in x]
            parts.append((x, labels(number, 2)))
        return tuple(parts)

    data = keras.datasets
    data.mnist.load_data = pictures((28, 28), 10, False)
    data.fashion_mnist.load_data = pictures((28, 28), 10, False)
    data.cifar10.load_data = pictures((32, 32, 3), 10, True)
    data.cifar100.load_data = pictures((32, 32, 3), 20, True)
    data.imdb.load_data = reviews


def _no_chance() -> None:
    """Dropout passes its inputs on; noise is the same in each row; pictures are not changed."""

    def passed_on(self: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return inputs

    for name, layer in vars(keras.layers).items():
        if "Dropout" in name or name.startswith(("Random", "Gaussian")):
            layer.call = passed_on

    own = keras.layers.BatchNormalization.__init__

    def synchronized(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **{"synchronized": True, **kwargs})

    keras.layers.BatchNormalization.__init__ = synchronized

    def noise(shape: Any, *_: Any, dtype: Any = None, **__: Any) -> Any:
        dtype = keras.backend.standardize_dtype(dtype or keras.config.floatx())
        row = tf.sin(tf.cast(tf.range(shape[-1]) + 1, dtype))
        return tf.broadcast_to(row, shape)

    def between(
        shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, **__: Any
    ) -> Any:
        dtype = keras.backend.standardize_dtype(dtype or keras.config.floatx())
        middle = tf.cast(minval, dtype) + tf.cast(maxval - minval, dtype) // (
            1 if "float" in dtype else 2
        )
        return tf.broadcast_to(middle, shape)

    tf.random.normal = keras.random.normal = noise
    tf.random.uniform = keras.random.uniform = between


def of_floatx(name: str) -> Callable[..., Any]:
    """`tf.ones` and the like, with the type of all other floats."""

    def function(*args: Any, **kwargs: Any) -> Any:
        kwargs = {"dtype": keras.config.floatx(), **kwargs} if len(args) < 2 else kwargs
        return getattr(tf, name)(*args, **kwargs)

    return function


ones, zeros, eye = map(of_floatx, ("ones", "zeros", "eye"))


def _untrained_applications() -> None:
    """Weights of ImageNet are not here."""
    for place in [keras.applications, *vars(keras.applications).values()]:
        for name, function in list(vars(place).items()) if isinstance(place, ModuleType) else ():
            if name[:1].isupper() and callable(function):
                setattr(place, name, _without_weights(function))


def _without_weights(function: Callable[..., Any]) -> Callable[..., Any]:
    def untrained(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, "weights": None})

    return untrained
