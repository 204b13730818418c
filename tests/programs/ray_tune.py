"""Trials of Ray Tune that train on two workers each: `ray_tune.py FOLDER`.

A worker of one trial is killed once. Writes the trials, and which processes are left after them.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import ray
from ray import tune

import tfmw
from tests.helpers.cluster import MARK, marked
from tests.programs._killed import KilledOnce

RATES = [0.1, 0.01, 0.001]
X: np.ndarray = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def loss_of(rate: float, callbacks: list[Any], **options: Any) -> float:
    """The validation loss after two epochs; by Keras without options."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    fit = tfmw.fit if options else keras.Model.fit
    given = {"epochs": 2, "batch_size": 16, "shuffle": False, "verbose": 0, **options}
    history = fit(model, X, Y, validation_data=(X, Y), callbacks=callbacks, **given)
    return float(history.history["val_loss"][-1])


def trial(config: dict[str, Any]) -> None:
    killed = [KilledOnce(config["folder"])] if config["rate"] == RATES[1] else []
    tune.report({"loss": loss_of(config["rate"], killed, workers=2)})


def main(folder: str) -> None:
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
    tuner = tune.Tuner(
        trial,
        param_space={"rate": tune.grid_search(RATES), "folder": folder},
        run_config=tune.RunConfig(
            storage_path=f"{folder}/tune", failure_config=tune.FailureConfig(max_failures=1)
        ),
    )
    found = tuner.fit()
    left = [c for c in marked(os.environ[MARK]).values() if "fork-server" in c or "task.py" in c]
    ray.shutdown()
    trials = [[r.config["rate"], r.metrics["loss"], r.error is None] for r in found]
    expected = [[rate, loss_of(rate, [])] for rate in RATES]
    Path(folder, "result.json").write_text(
        json.dumps({"trials": trials, "expected": expected, "left": left})
    )


if __name__ == "__main__":
    main(sys.argv[1])
