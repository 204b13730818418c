"""Names of legacy Keras's modules, for objects of Keras 3 with the same names.

    install(Path("tf-keras"))
    from tf_keras.layers.rnn import lstm       # lstm.LSTM is keras.layers.LSTM
    from tf_keras.distribute import strategy_combinations      # a file of the checkout

A module is any name below `tf_keras`, and has the objects that Keras 3 has under that name in any
module. `_OTHERS` has the names that only tests use, and those that Keras 3 has renamed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_PLACES = (
    keras,
    keras.layers,
    keras.models,
    keras.optimizers,
    keras.metrics,
    keras.losses,
    keras.callbacks,
    keras.utils,
    keras.saving,
    keras.backend,
    keras.ops,
)


def install(checkout: Path) -> None:
    """Makes `tf_keras` importable; `checkout` has `tf_keras/distribute`."""
    sys.meta_path.insert(0, _Finder(checkout / "tf_keras" / "distribute"))
    keras.optimizers.Optimizer.lr = property(lambda self: self.learning_rate)
    # Keras 3 takes no optimizers of TensorFlow 1, and has one kind of BatchNormalization.
    for name, optimizer in _OF_TENSORFLOW_1.items():
        setattr(tf.compat.v1.train, name, optimizer)
    normalization = keras.layers.BatchNormalization
    initialize = normalization.__init__

    def without_fused(self: Any, *, fused: Any = None, **kwargs: Any) -> None:
        initialize(self, **kwargs)

    normalization.__init__ = without_fused


_OF_TENSORFLOW_1 = {
    "AdagradOptimizer": keras.optimizers.Adagrad,
    "AdamOptimizer": keras.optimizers.Adam,
    "GradientDescentOptimizer": keras.optimizers.SGD,
    "RMSPropOptimizer": keras.optimizers.RMSprop,
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, distribute: Path):
        self._distribute = distribute

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != "tf_keras":
            return None
        if fullname.startswith("tf_keras.distribute."):
            found = importlib.machinery.PathFinder.find_spec(fullname, [str(self._distribute)])
            if found is not None:
                return found
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(_OTHERS.get(module.__name__, {}))

        def find(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if f"{module.__name__}.{name}" in _OTHERS:
                return importlib.import_module(f"{module.__name__}.{name}")
            for place in _PLACES:
                if hasattr(place, name):
                    return getattr(place, name)
            raise AttributeError(f"Keras 3 has no {module.__name__}.{name}")

        vars(module)["__getattr__"] = find


def _unchanged(*args: Any, **_: Any) -> Any:
    """A decorator, with or without arguments, that changes nothing."""
    return args[0] if args and not isinstance(args[0], str) else lambda decorated: decorated


def _get_test_data(
    train_samples: int,
    test_samples: int,
    input_shape: tuple[int, ...],
    num_classes: int,
    random_seed: int,
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Classes around templates, with noise, as the tests of legacy Keras have them."""
    rng = np.random.RandomState(random_seed)
    number = train_samples + test_samples
    y = rng.randint(0, num_classes, size=(number,))
    templates = 2 * num_classes * rng.random_sample((num_classes, *input_shape))
    x = np.stack([templates[label] + rng.normal(0, 1.0, input_shape) for label in y])
    x = x.astype("float32")
    return (x[:train_samples], y[:train_samples]), (x[train_samples:], y[train_samples:])


class _Reduction:
    AUTO = SUM_OVER_BATCH_SIZE = "sum_over_batch_size"
    NONE = "none"
    SUM = "sum"


@contextlib.contextmanager
def _policy_scope(policy: Any) -> Iterator[None]:
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.mixed_precision.set_dtype_policy(before)


def _dataset_creator(dataset_fn: Any, input_options: Any = None) -> Any:
    return dataset_fn


_OTHERS: dict[str, dict[str, Any]] = {
    "tf_keras.backend": {
        "get_value": lambda value: value.numpy(),
        "set_value": lambda variable, value: variable.assign(value),
        "is_tpu_strategy": lambda strategy: False,
    },
    "tf_keras.engine.base_layer_utils": {},
    "tf_keras.mixed_precision.policy": {
        "global_policy": keras.mixed_precision.dtype_policy,
        "set_global_policy": keras.mixed_precision.set_dtype_policy,
        "Policy": keras.mixed_precision.DTypePolicy,
        "policy_scope": _policy_scope,
    },
    "tf_keras.testing_infra.test_utils": {
        "run_all_without_tensor_float_32": _unchanged,
        "run_v2_only": _unchanged,
        "enable_v2_dtype_behavior": _unchanged,
        "get_test_data": _get_test_data,
        "is_gpu_available": lambda: bool(tf.config.list_physical_devices("GPU")),
    },
    "tf_keras.utils.data_utils": {"Sequence": keras.utils.PyDataset},
    "tf_keras.utils.dataset_creator": {"DatasetCreator": _dataset_creator},
    "tf_keras.utils.losses_utils": {"ReductionV2": _Reduction},
    "tf_keras.utils.tf_contextlib": {"contextmanager": contextlib.contextmanager},
    "tf_keras.utils.np_utils": {"to_categorical": keras.utils.to_categorical},
}
