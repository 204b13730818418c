"""One item for each class that Keras exports: how it is put into a model, with which data."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.keras_compat.survey.contexts import CLASSES, FEATURES, Context
from tests.keras_compat.survey.feeding import (
    case_of,
    fed,
    hidden_layers,
    inputs_of,
    labels_of,
    network,
    only_trained,
    plain,
)
from tests.keras_compat.survey.layer_recipes import (
    ASSIGNING_WITHOUT_DATA,
    BINNING,
    DRAWING,
    NOT_LAYERS_OF_A_STEP,
    OF_THE_BATCH,
    RECIPES,
    TOGETHER,
)
from tests.matrix.row import Case


@dataclasses.dataclass(frozen=True)
class Item:
    """An item that is tried.

    Attributes:
        kind: "losses", "metrics", "optimizers" or "layers".
        name: name of the class, and of this use of it.
        build: makes a case in a context.
        tol: greatest difference that rounding explains.
        together: items of the same value may be tried in one model; None for each by itself.
        branch: the branch of such a model for this item.
        draws: whether it draws random numbers, so that replicas differ.
    """

    kind: str
    name: str
    build: Callable[[Context], Case]
    tol: float = 1e-4
    together: Any = None
    branch: Any = None
    draws: bool = False


def in_groups(chosen: list[Item], size: int = 8) -> list[list[Item]]:
    """Items that may share a model, at most `size` in one."""
    groups: dict[Any, list[Item]] = {}
    for i, item in enumerate(chosen):
        groups.setdefault(i if item.together is None else item.together, []).append(item)
    return [g[i : i + size] for g in groups.values() for i in range(0, len(g), size)]


def combined(branches: list[Any]) -> Callable[[Context], Case]:
    """Makes one case of several losses or metrics, or of several layers side by side."""
    kind, data = branches[0][:2]
    parts = [branch[2] for branch in branches]
    if kind == "losses":
        return lambda context: _of_losses(context, parts, data)
    if kind == "metrics":
        return lambda context: _of_metrics(context, parts, data)
    return lambda context: _around_layers(context, parts, *data)


def classes_of(kind: str) -> dict[str, type]:
    """Name -> class, of what a module of Keras exports; aliases once."""
    module = getattr(keras, kind)
    base = {
        "losses": keras.losses.Loss,
        "metrics": keras.metrics.Metric,
        "optimizers": keras.optimizers.Optimizer,
        "layers": layers.Layer,
    }[kind]
    found = {
        value.__name__: value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    }
    return dict(sorted(found.items()))


def items() -> list[Item]:
    """Everything that is tried."""
    return [*_losses(), *_metrics(), *_optimizers(), *_layers()]


def left_out() -> dict[str, str]:
    """Name of an exported class that is not tried -> why."""
    return {**NOT_LAYERS_OF_A_STEP, "MeanMetricWrapper": "the base class of most metrics"}


# ---------------------------------------------------------------- losses

# Name -> (labels, activation of the output); others: (number, sigmoid).
_LOSS_DATA = {
    "CategoricalCrossentropy": ("one hot", "softmax"),
    "CategoricalFocalCrossentropy": ("one hot", "softmax"),
    "CategoricalGeneralizedCrossEntropy": ("index", "softmax"),
    "CategoricalHinge": ("one hot", "softmax"),
    "Hinge": ("sign", "tanh"),
    "SparseCategoricalCrossentropy": ("index", "softmax"),
    "SquaredHinge": ("sign", "tanh"),
}


# Losses with one label for each example.
_OF_EXAMPLES = ("CTC", "Circle", "CategoricalGeneralizedCrossEntropy", "Dice", "Tversky")


def _losses() -> list[Item]:
    found = []
    for name, cls in classes_of("losses").items():
        if name in _OF_EXAMPLES:

            def build(context: Context, name: str = name, cls: Any = cls) -> Case:
                return _of_examples(plain(context), name, cls)

            found.append(Item("losses", name, build))
            continue

        def make(context: Context, cls: Any = cls) -> Any:
            return cls(reduction=context.reduction)

        branch = ("losses", _LOSS_DATA.get(name, ("number", "sigmoid")), make)
        found.append(Item("losses", name, combined([branch]), together=branch[:2], branch=branch))
    for name in ("MeanSquaredError", "SparseCategoricalCrossentropy"):
        found.append(Item("losses", f"{name} in a layer, by add_loss", _endpoint(name)))
    return found


def _of_losses(context: Context, makes: list[Callable[..., Any]], data: tuple[str, str]) -> Case:
    """One loss, or a model with an output for each of several."""
    labels, activation = data
    y = labels_of(context, labels)
    if len(makes) == 1:
        model = keras.Sequential(network(context, activation))
        return case_of(context, model, inputs_of(context), y, loss=makes[0](context))
    first, *hidden = hidden_layers(context)
    shared = first
    for layer in hidden:
        shared = layer(shared)
    names = [f"out{i}" for i in range(len(makes))]
    outputs = {n: layers.Dense(CLASSES, activation=activation, name=n)(shared) for n in names}
    losses = {n: make(context) for n, make in zip(names, makes, strict=True)}
    model = keras.Model(first, outputs)
    return case_of(context, model, inputs_of(context), dict.fromkeys(names, y), loss=losses)


def _of_examples(context: Context, name: str, cls: Any) -> Case:
    loss, x = cls(reduction=context.reduction), inputs_of(context)
    if name == "CTC":
        model = keras.Sequential(
            [*network(context, None), layers.Dense(24), layers.Reshape([8, 3])]
        )
        labels = context.random().integers(1, 3, (context.examples, 3)).astype("int32")
        return case_of(context, model, x, labels, loss=loss)
    if name == "Circle":
        model = keras.Sequential([*network(context, None), layers.UnitNormalization()])
        return case_of(context, model, x, labels_of(context, "index"), loss=loss)
    labels, activation = _LOSS_DATA.get(name, ("number", "sigmoid"))
    model = keras.Sequential(network(context, activation))
    return case_of(context, model, x, labels_of(context, labels), loss=loss)


class Endpoint(layers.Layer):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss_fn = loss

    def call(self, labels: Any, outputs: Any) -> Any:
        self.add_loss(self.loss_fn(labels, outputs))
        return outputs


def _endpoint(name: str) -> Callable[[Context], Case]:
    def build(context: Context) -> Case:
        context = plain(context)
        labels, activation = _LOSS_DATA.get(name, ("number", "sigmoid"))
        y = labels_of(context, labels)
        inputs = {"x": keras.Input([FEATURES]), "y": keras.Input(y.shape[1:], dtype=y.dtype.name)}
        outputs = inputs["x"]
        for layer in network(context, activation)[1:]:
            outputs = layer(outputs)
        loss = getattr(keras.losses, name)(reduction=context.reduction)
        model = keras.Model(inputs, Endpoint(loss)(inputs["y"], outputs))
        model.compile(keras.optimizers.SGD(0.05))
        return fed(context, model, {"x": inputs_of(context), "y": y})

    return build


# ---------------------------------------------------------------- metrics

_BINARY = ("AUC", "Precision", "Recall", "False", "True", "PrecisionAt", "RecallAt", "Sensitivity")
# Metrics of [n, classes] only; others count the steps of sequences, too.
_METRICS_OF_EXAMPLES = ("F1Score", "FBetaScore", "R2Score", "OneHotIoU", "OneHotMeanIoU")

_METRIC_ARGUMENTS: dict[str, dict[str, Any]] = {
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "FBetaScore": {"average": "macro"},
    "F1Score": {"average": "micro"},
    "IoU": {"num_classes": 2, "target_class_ids": [1]},
    "MeanIoU": {"num_classes": 2},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "TopKCategoricalAccuracy": {"k": 2},
}


class TracksValues(keras.Model):
    """A model that gives values of its own to a metric such as Mean."""

    def __init__(self, context: Context, metric: Any, values: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net = keras.Sequential(network(context, "tanh"))
        self.metric, self.values = metric, values

    def call(self, x: Any) -> Any:
        return self.net(x)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.metric.update_state(self.values(y_pred))
        return super().compute_metrics(x, y, y_pred, sample_weight)


def _metric_labels(name: str) -> tuple[str, str]:
    if name.startswith("Sparse"):
        return "index", "softmax"
    if name.startswith(("IoU", "MeanIoU", "BinaryIoU")):
        return "threshold", "threshold"
    if name.startswith(("Categorical", "TopK", "OneHot", "F1", "FBeta", "Binary", *_BINARY)):
        return "one hot", "softmax"
    return "number", "sigmoid"


def _metrics() -> list[Item]:
    tracked: dict[str, Any] = {
        "Mean of values": (keras.metrics.Mean, lambda t: t),
        "Mean of one number": (keras.metrics.Mean, keras.ops.mean),
        "Mean of a number that is a sum": (keras.metrics.Mean, keras.ops.sum),
        "Sum of values": (keras.metrics.Sum, lambda t: t),
        "Sum of one number": (keras.metrics.Sum, keras.ops.mean),
        "Sum of a number that is a sum": (keras.metrics.Sum, keras.ops.sum),
    }
    found = []
    for name, (cls, f) in tracked.items():

        def build_tracked(context: Context, cls: Any = cls, f: Any = f) -> Case:
            return _tracked(context, cls(name="own"), f)

        found.append(Item("metrics", name, build_tracked))
    for name, cls in classes_of("metrics").items():
        if name in ("Mean", "Sum", "MeanMetricWrapper"):
            continue

        def make(name: str = name, cls: Any = cls) -> Any:
            return cls(**_METRIC_ARGUMENTS.get(name, {}))

        labels, activation = _metric_labels(name)
        of_entries = labels != "threshold" and name not in _METRICS_OF_EXAMPLES
        branch = ("metrics", (labels, activation, of_entries), make)
        found.append(Item("metrics", name, combined([branch]), together=branch[:2], branch=branch))
    return found


def _of_metrics(
    context: Context, makes: list[Callable[[], Any]], data: tuple[str, str, bool]
) -> Case:
    labels, activation, of_entries = data
    if not of_entries:
        context = dataclasses.replace(context, masked=False)
    if labels == "threshold":  # metrics of class numbers, as of a step function
        model = keras.Sequential([*network(context, "sigmoid"), layers.Lambda(_rounded)])
        y = np.round(labels_of(context, "number"))
    else:
        model = keras.Sequential(network(context, activation))
        y = labels_of(context, labels)
    loss: Any = keras.losses.MeanSquaredError()
    if labels == "index":
        loss = keras.losses.SparseCategoricalCrossentropy()
    # Keras weighs the entries of these, and not the examples.
    weighted = context.weighted and labels != "threshold"
    options = {"weighted_metrics" if weighted else "metrics": [make() for make in makes]}
    return case_of(context, model, inputs_of(context), y, loss=loss, **options)


def _rounded(t: Any) -> Any:
    return t + keras.ops.stop_gradient(keras.ops.round(t) - t)


def _tracked(context: Context, metric: Any, values: Callable[[Any], Any]) -> Case:
    context = plain(context)
    model = TracksValues(context, metric, values)
    return case_of(context, model, inputs_of(context), labels_of(context, "number"))


# ---------------------------------------------------------------- optimizers

# With a large epsilon: else a first step on a gradient that is all rounding is as large as others.
_OPTIMIZER_OPTIONS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.01},
    "weight_decay": {"weight_decay": 0.1},
    "EMA": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "loss_scale_factor": {"loss_scale_factor": 64.0},
}


def _optimizer(name: str, cls: Any, **options: Any) -> Any:
    if name == "LossScaleOptimizer":
        return cls(keras.optimizers.SGD(0.05), initial_scale=1024.0)
    if name == "MultiOptimizer":
        sgd, adam = keras.optimizers.SGD(0.05), keras.optimizers.Adam(0.01, epsilon=1e-2)
        mapping = keras.optimizers.OptimizerMap(sgd)
        mapping[".*bias"] = adam
        return cls(mapping)
    if "epsilon" in inspect.signature(cls).parameters and name != "Adafactor":
        options["epsilon"] = 1e-2
    return cls(learning_rate=0.01, **options)


def _optimizers() -> list[Item]:
    found = []
    for name, cls in classes_of("optimizers").items():
        variants: dict[str, dict[str, Any]] = {"": {}}
        if name in ("SGD", "Adam", "Lamb", "Adafactor", "Muon", "ScheduleFreeAdamW"):
            variants.update(_OPTIMIZER_OPTIONS)
        for variant, options in variants.items():

            def build(
                context: Context, name: str = name, cls: Any = cls, options: Any = options
            ) -> Case:
                # Keras counts one step more at the end of data of unknown length.
                context = plain(_of_known_length(context))
                model = keras.Sequential(network(context, "tanh"))
                optimizer = _optimizer(name, cls, **options)
                y = labels_of(context, "number")
                case = case_of(context, model, inputs_of(context), y, optimizer=optimizer)
                if name == "ScheduleFreeAdamW":
                    # Keras's fit builds it in a symbolic scope, where its momentum's first value,
                    # the weights, is lost: it would train from weights of zero.
                    optimizer.build(model.trainable_variables)
                return only_trained(case)

            found.append(Item("optimizers", f"{name} {variant}".strip(), build, tol=2e-3))
    return found


def _of_known_length(context: Context) -> Context:
    known = "dataset" if context.feed == "unknown length" else context.feed
    return dataclasses.replace(context, feed=known)


# ---------------------------------------------------------------- layers


def _layers() -> list[Item]:
    found = []
    for name, cls in classes_of("layers").items():
        if name in NOT_LAYERS_OF_A_STEP:
            continue
        for variant, recipe in RECIPES.get(name, {"": ((8, 6), {})}).items():
            arguments = recipe[1]
            dtype = recipe[2] if len(recipe) > 2 else "float32"

            def make(cls: Any = cls, arguments: Any = arguments) -> Any:
                return arguments() if callable(arguments) else cls(**arguments)

            branch = ("layers", (recipe[0], dtype), make)
            draws = name.startswith("Random") or name in DRAWING
            alone = name in OF_THE_BATCH or name in BINNING or variant
            together = None if alone else (draws, *branch[:2])
            item_name = f"{name} {variant}".strip()
            found.append(
                Item(
                    "layers",
                    item_name,
                    combined([branch]),
                    tol=1e-2 if name in BINNING else 1e-4,
                    together=together,
                    branch=branch,
                    draws=draws,
                )
            )
    return found


def _around_layers(
    context: Context, makes: list[Callable[[], Any]], shape: tuple[int, ...], dtype: str
) -> Case:
    context = plain(context)
    inputs = before = keras.Input(shape, dtype=dtype)
    random, full = context.random(), (context.examples, *shape)
    if dtype == "float32":
        x = random.uniform(0, 1, full).astype(dtype)
        before = layers.Dense(shape[-1], kernel_regularizer=context.regularizer())(inputs)
    elif dtype == "string":
        x = random.choice(["a", "b", "c d"], full)
    else:
        x = random.integers(0, 4, full).astype(dtype)
    outputs = []
    for make in makes:
        layer = make()
        if type(layer).__name__ in ASSIGNING_WITHOUT_DATA:
            context = _of_known_length(context)
        after = layer([before, before * 0.5] if type(layer).__name__ in TOGETHER else before)
        outputs.append(layers.Dense(CLASSES)(layers.Flatten()(keras.ops.cast(after, "float32"))))
    model = keras.Model(inputs, sum(outputs))
    # Slowly: rounding must not be multiplied by what diverges.
    y, slow = labels_of(context, "number"), keras.optimizers.SGD(0.002)
    return only_trained(case_of(context, model, x, y, optimizer=slow))
