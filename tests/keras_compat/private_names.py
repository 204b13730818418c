"""The names of Keras and TensorFlow that `tfmw.compat` takes from their modules and objects."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import distribution_lib
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.data.ops.dataset_ops import DatasetV2
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.eager.cancellation import CancellationManager
from tensorflow.python.eager.context import Context
from tensorflow.python.ops import gen_stateless_random_ops_v2

from tfmw import compat
from tfmw.compat import (
    assigned_weights,
    local_updates,
    model_methods,
    step_hooks,
    table_variables,
)
from tfmw.compat.objects import BaseTrainer, Trainer

# Names that `tfmw.compat` takes from objects of these classes, or replaces in this module.
_OF_OBJECTS: dict[Any, str] = {
    sys.modules[keras.utils.get_file.__module__]: "urlretrieve config",
    distribution_lib: "list_devices",
    tf.Graph: "_get_function",
    Trainer: "_symbolic_build _should_eval _flatten_metrics_in_order",
    BaseTrainer: "_aggregate_additional_loss",
    keras.Model: "_flatten_layers",
    keras.Variable: "_direct_assign",
    keras.optimizers.Optimizer: "_backend_apply_gradients _clip_gradients _get_variable_index "
    "_var_key _get_current_learning_rate _use_weight_decay scale_loss",
    keras.optimizers.LossScaleOptimizer: "_tf_apply _common_apply check_finite",
    DatasetV2: "_functions _inputs _variant_tensor",
    OwnedIterator: "_create_iterator",  # this method sets _iterator_resource
    CancellationManager: "get_cancelable_function",
    tf.random.Generator: "_prepare_key_counter",
    Context: "configure_coordination_service set_config_key_value get_config_key_value "
    "delete_config_key_value wait_at_barrier report_error_to_cluster",
}


# Keras 3.16 has other names.
_RENAMED = {"keras.src.backend.tensorflow.trainer.Trainer", "keras.src.trainers.trainer.Trainer"}


def missing_names() -> list[str]:
    """Names that the installed versions lack; [] if all exist."""
    used: list[tuple[Any, str]] = [
        (owner, name) for owner, names in _OF_OBJECTS.items() for name in names.split()
    ]
    used += [(owner, name) for owner, name, _ in (*step_hooks.HOOKS, *assigned_weights.HOOKS)]
    used += [(BaseOptimizer, name) for name in local_updates.CROSS_REPLICA_METHODS]
    used += [(gen_stateless_random_ops_v2, name) for name in table_variables.COUNTERS]
    methods = [(Trainer, name) for name in model_methods.METHODS]
    used += [*methods, *((getattr(*method), "__wrapped__") for method in methods[:3])]
    for module in pkgutil.walk_packages(compat.__path__, f"{compat.__name__}."):
        used += _taken_by(importlib.import_module(module.name))
    missing = {
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, name in used
        if not hasattr(owner, name)
    }
    return sorted(missing - _RENAMED)


def _taken_by(module: ModuleType) -> Iterator[tuple[Any, str]]:
    """Yields (owner, name) of attributes of modules and classes in the source of a module.

    Tuples (owner, "name", replacement) are those of `overridden`.
    """
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        match node:
            case ast.Attribute(value=value, attr=str(name)):
                owner = _named(value, module)
            case ast.Tuple(elts=[ast.expr() as value, ast.Constant(value=str(name)), _]):
                owner = _named(value, module)
            case _:
                continue
        if owner is not None:
            yield owner, name


def _named(node: ast.expr, module: ModuleType) -> Any:
    """The module or class of Keras or TensorFlow that an expression names; None for others."""
    if isinstance(node, ast.Name):
        found = vars(module).get(node.id)
    elif isinstance(node, ast.Attribute):
        found = getattr(_named(node.value, module), node.attr, None)
    else:
        return None
    name = getattr(found, "__name__", "") if inspect.ismodule(found) else ""
    name = getattr(found, "__module__", "") if inspect.isclass(found) else name
    return found if name.partition(".")[0] in ("keras", "tensorflow") else None
