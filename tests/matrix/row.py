"""A row of the matrix: a model with its data, how equal it must be, and how it is run.

    @row("sequential")
    def sequential() -> Case:
        model = ...
        return Case(model, x=dataset)

`run(row, None)` is the reference: one process, Keras's own methods. `run(row, strategy)` is tfmw.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmw

EPOCHS = 2


@dataclasses.dataclass
class Case:
    """Model and data that one row trains, evaluates and predicts.

    Attributes:
        model: compiled, built anywhere.
        x, y: arguments of `fit`.
        fit: more arguments of `fit`.
        evaluate: arguments of `evaluate`; default: the training data. None: not evaluated.
        predict: `x` of `predict`; default: the training data. None: not predicted.
        optimizers: those whose variables are compared.
        reference: arguments of `fit` that stock Keras gets in place of these.
        ours: arguments that `tfmw.fit` alone takes.
    """

    model: Any
    x: Any
    y: Any = None
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    evaluate: Any = "training data"
    predict: Any = "training data"
    optimizers: list[Any] | None = None
    reference: dict[str, Any] = dataclasses.field(default_factory=dict)
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """An entry of the matrix.

    Attributes:
        name: name of the row.
        build: makes the case, afresh.
        tol: greatest difference allowed, relative to the largest value of each array.
        logs_tol: the same for logs; default `tol`.
        but: why this row cannot equal one process; then `equal` says what must still be equal,
            and everything else need only be finite and the same on every worker.
        equal: prefixes of result names that must be equal to one process.
        core: in the small set that runs on the oldest supported versions.
        fast: in the smaller part of the core that `make test` runs on two processes.
        nightly: `make test` leaves it to `make nightly`, as it has rows of the same kind, or as it
            takes long.
        warns: part of a warning that tfmw must give on several replicas. If it is None, tfmw must
            not warn that results differ.
        only: the columns that run it; empty for all.
        floatx: Keras's default type while it runs.
    """

    name: str
    build: Callable[[], Case]
    tol: float = 1e-5
    logs_tol: float | None = None
    but: str = ""
    equal: tuple[str, ...] = ("",)
    core: bool = False
    fast: bool = False
    nightly: bool = False
    warns: str = ""
    only: tuple[str, ...] = ()
    floatx: str = "float32"


ROWS: dict[str, Row] = {}


def row(name: str, **options: Any) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Registers a function that builds a case as the row `name`; `options` are `Row`'s."""

    def register(build: Callable[[], Case]) -> Callable[[], Case]:
        assert name not in ROWS, f"two rows are called {name}"
        ROWS[name] = Row(name, build, **options)
        return build

    return register


def run(
    row: Row, strategy: tf.distribute.Strategy | str | None, **options: Any
) -> dict[str, np.ndarray]:
    """Trains, evaluates and predicts.

    Args:
        strategy: of tfmw; None for Keras's own methods in one process; "plain" for calls of
            Keras's methods that are tfmw's.
        **options: arguments of `tfmw.fit` besides.

    Returns:
        Name -> array: "log/...", "evaluate/...", "predict/...", "weight/...", "optimizer/...",
        and "warned": 1 where the warning of the row was given, or, of a row without one, a
        warning that results differ.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(row.floatx)
    keras.config.set_dtype_policy(row.floatx)
    try:
        return _run(row, strategy, options)
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def _run(
    row: Row, strategy: tf.distribute.Strategy | str | None, options: dict[str, Any]
) -> dict[str, np.ndarray]:
    case = row.build()
    case.ours = {**case.ours, **options}
    model = case.model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if strategy == "plain":
            results = _plain(case)
        else:
            results = _stock(case) if strategy is None else _tfmw(case, strategy)
    for i, variable in enumerate(model.weights):
        results[f"weight/{i} {_name(variable)}"] = np.asarray(variable.value)
    for n, optimizer in enumerate(case.optimizers or [model.optimizer]):
        for i, variable in enumerate(optimizer.variables):
            results[f"optimizer/{n}/{i}"] = np.asarray(variable.value)
    differs = "results depend on the number of replicas", "tfmw cannot tell"
    said = (row.warns,) if row.warns else differs
    heard = any(words in str(w.message) for words in said for w in caught)
    results["warned"] = np.array(int(heard))
    return results


def compared(results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Results that must equal those of one process."""
    return {name: value for name, value in results.items() if name != "warned"}


def _stock(case: Case) -> dict[str, np.ndarray]:
    arguments = {"epochs": EPOCHS, "verbose": 0, **case.fit}
    if not isinstance(case.x, tf.data.Dataset | keras.utils.PyDataset) and case.y is not None:
        arguments["y"] = case.y
    arguments = {"x": case.x, **arguments, **case.reference}
    history = case.model.fit(**arguments)
    return _results(
        case,
        history,
        lambda **kw: case.model.evaluate(verbose=0, return_dict=True, **kw),
        lambda x: case.model.predict(x, verbose=0),
        arguments["x"],
    )


def _plain(case: Case) -> dict[str, np.ndarray]:
    model = case.model
    with tfmw.options(**case.ours):
        history = model.fit(case.x, case.y, **{"epochs": EPOCHS, "verbose": 0, **case.fit})
    return _results(
        case,
        history,
        lambda **kw: model.evaluate(verbose=0, return_dict=True, **kw),
        lambda x: model.predict(x, verbose=0),
        case.x,
    )


def _tfmw(case: Case, strategy: tf.distribute.Strategy | str) -> dict[str, np.ndarray]:
    arguments = {"epochs": EPOCHS, "verbose": 0, "strategy": strategy, **case.fit, **case.ours}
    history = tfmw.fit(case.model, case.x, case.y, **arguments)
    return _results(
        case,
        history,
        lambda **kw: tfmw.evaluate(
            case.model, verbose=0, return_dict=True, strategy=strategy, **kw
        ),
        lambda x: tfmw.predict(case.model, x, verbose=0, strategy=strategy),
        case.x,
    )


def _results(
    case: Case, history: Any, evaluate: Any, predict: Any, x: Any
) -> dict[str, np.ndarray]:
    out = {f"log/{name}": np.asarray(values) for name, values in history.history.items()}
    if case.evaluate is not None:
        data = {"x": x} if case.evaluate == "training data" else case.evaluate
        if case.evaluate == "training data" and case.y is not None:
            data["y"] = case.y
        for name, value in evaluate(**data).items():
            out[f"evaluate/{name}"] = np.asarray(value)
    if case.predict is not None:
        predictions = predict(x if isinstance(case.predict, str) else case.predict)
        for path, value in _leaves(predictions):
            out[f"predict/{path}"] = np.asarray(value)
    return out


def _name(variable: Any) -> str:
    """The end of its path: where a variable was first needed shows in the beginning."""
    return "/".join(variable.path.split("/")[-2:] if "moving" in variable.path else [variable.name])


def _leaves(structure: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(structure, dict):
        return [leaf for k, v in structure.items() for leaf in _leaves(v, f"{path}/{k}")]
    if isinstance(structure, list | tuple):
        return [leaf for k, v in enumerate(structure) for leaf in _leaves(v, f"{path}/{k}")]
    return [(path, structure)]


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """The greatest difference, relative to the largest expected value (at least 1e-3)."""
    if got.shape != expected.shape:
        return float("inf")
    if not got.size:
        return 0.0
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-3))
