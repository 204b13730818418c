"""One pass over data: `tfmw.evaluate`, `tfmw.predict`, and the validation of `fit`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmw import data
from tfmw.compat.metric_variables import flatten_metrics
from tfmw.train.arguments import FitArguments, limited_steps
from tfmw.train.epoch_iterator import EpochIterator
from tfmw.train.fit_context import FitContext
from tfmw.train.loop import ValidationSignals
from tfmw.train.mirrored.sync_driver import SyncDriver
from tfmw.train.mirrored.sync_training import run_evaluation
from tfmw.train.mirrored.synchronization import EachStep
from tfmw.train.own_methods import calling_evaluate


def pass_over(
    method: str,
    run: Callable[..., Any],
    of_call: dict[str, Any],
    *,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    steps: int | None = None,
    verbose: Any = "auto",
    callbacks: Any = None,
    **of_method: Any,
) -> Any:
    """The result of `run(driver, group, batches, callback_list, **of_method)`.

    Args:
        of_call: `model`, `strategy` and `split_batch`.
    """
    context = FitContext.of(of_call["model"], of_call["strategy"], method)
    steps, splits = limited_steps(steps), of_call["split_batch"]
    source = data.Source(x, y, sample_weight, batch_size, steps, split=splits)
    batches = EpochIterator(source, context.group, context.sharding, steps, "steps")
    evaluates = method == "evaluate"
    context.build(batches.shard.element_spec, for_inputs=not evaluates)
    with EachStep(context.strategy).driver(context.model) as driver:
        driver.splits = splits
        callback_list = context.callback_list(
            callbacks,
            driver,
            verbose=verbose,
            steps=batches.steps_per_epoch,
            counts=evaluates,
        )
        return run(driver, context.group, batches, callback_list, **of_method)


def evaluated(driver: SyncDriver, *of_call: Any, return_dict: bool) -> Any:
    """The result of `evaluate`: arguments of `run_evaluation`, and how Keras returns its logs."""
    logs = run_evaluation(driver, *of_call)
    return logs if return_dict else flatten_metrics(driver.model, logs)


def validate_here(
    model: keras.Model,
    arguments: FitArguments,
    callbacks: Any = None,
    signals: ValidationSignals | None = None,
) -> dict[str, Any]:
    """Evaluates on the validation data in this process only; returns the logs."""
    del callbacks  # none runs around batches of a validation beside parameter servers
    source = arguments.validation_source
    assert source is not None
    logs: dict[str, Any] = pass_over(
        "evaluate",
        functools.partial(run_evaluation, signals=signals),
        {"model": model, "strategy": "default", "split_batch": True},
        x=source.x,
        y=source.y,
        sample_weight=source.sample_weight,
        batch_size=source.batch_size,
        steps=source.steps,
        verbose=0,
    )
    return logs


def validate_as_user(
    context: FitContext,
    arguments: FitArguments,
    ordinary_model: Callable[..., contextlib.AbstractContextManager[None]] | None,
    validate: Callable[..., dict[str, Any]],
    callback_list: Any = None,
    signals: ValidationSignals | None = None,
) -> dict[str, Any]:
    """Validates as Keras's fit does: by `model.evaluate`, which the model's class overrides."""
    model, source = context.model, arguments.validation_source
    assert source is not None
    of_call = {"model": model, "strategy": context.strategy, "split_batch": arguments.split_batch}
    ordinary = contextlib.ExitStack()  # while code of the user's runs

    def enter() -> None:
        if ordinary_model is not None:
            ordinary.enter_context(ordinary_model(True))

    def evaluate(_use_cached_eval_dataset: bool = False, **passed: Any) -> Any:
        if not _use_cached_eval_dataset:
            return pass_over("evaluate", evaluated, of_call, **passed)
        ordinary.close()
        try:
            logs = validate(callback_list, signals)
        finally:
            enter()
        return logs if passed["return_dict"] else flatten_metrics(model, logs)

    with ordinary, calling_evaluate(model, context.strategy, evaluate):
        enter()
        logs: dict[str, Any] = model.evaluate(
            x=source.x,
            y=source.y,
            sample_weight=source.sample_weight,
            batch_size=source.batch_size,
            steps=source.steps,
            callbacks=getattr(callback_list, "of_keras", callback_list),
            return_dict=True,
            _use_cached_eval_dataset=True,  # of `fit`, already: Keras ignores x, y and weights
        )
    return logs
