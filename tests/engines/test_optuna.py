"""`tfmw.fit(workers=2)` within the trials of Optuna, which the workers may prune."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import optuna
import pytest

import tfmw
from tests.helpers.cluster import ONE_THREAD
from tests.programs._killed import KilledOnce
from tfmw.errors import TaskFailed

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
RATES = [0.1, 1e-6, 0.12]  # the second one is pruned; of the last one a worker may be killed


class Prune(keras.callbacks.Callback):
    """Reports to the trial and ends it early, as Optuna's callback for Keras does."""

    def __init__(self, trial: optuna.Trial, reports: Path) -> None:
        super().__init__()
        self.trial = trial
        self.reports = reports

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trial.report(logs["val_loss"], epoch)
        with open(self.reports, "a") as file:
            print(self.trial.number, epoch, file=file)
        if self.trial.should_prune():
            raise optuna.TrialPruned(f"pruned after epoch {epoch}")


def studied(folder: Path, workers: int | None) -> list[optuna.trial.FrozenTrial]:
    def objective(trial: optuna.Trial) -> float:
        keras.utils.set_random_seed(1)
        rate = trial.suggest_float("rate", 1e-7, 1.0)
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(rate), "mse")
        given: dict[str, Any] = {
            "epochs": 3,
            "batch_size": 16,
            "validation_data": (X, Y),
            "callbacks": [Prune(trial, folder / f"{workers}.reports")],
            "verbose": 0,
        }
        if rate == RATES[-1] and workers is not None:
            given["callbacks"].append(KilledOnce(str(folder)))
        fitted = (
            model.fit(X, Y, shuffle=False, **given)
            if workers is None
            else tfmw.fit(model, X, Y, shuffle=False, workers=workers, **given)
        )
        loss: float = fitted.history["val_loss"][-1]
        return loss

    storage = f"sqlite:///{folder}/{workers}.db"
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    study = optuna.create_study(storage=storage, pruner=pruner)
    for rate in RATES:
        study.enqueue_trial({"rate": rate})
    study.optimize(objective, n_trials=len(RATES), catch=(TaskFailed,))
    return optuna.load_study(study_name=study.study_name, storage=storage).trials


@pytest.mark.nightly
@pytest.mark.process
def test_trials_are_as_with_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    expected, found = studied(tmp_path, None), studied(tmp_path, 2)
    assert [trial.state.name for trial in expected] == ["COMPLETE", "PRUNED", "COMPLETE"]
    # The study continues after a trial that has failed.
    assert [trial.state.name for trial in found] == ["COMPLETE", "PRUNED", "FAIL"]
    # Once for each epoch, by one worker.
    reports = (tmp_path / "2.reports").read_text().splitlines()
    assert sorted(reports) == sorted(set(reports))
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert one.params == other.params
        assert one.intermediate_values.keys() == other.intermediate_values.keys()
        for epoch, value in other.intermediate_values.items():
            assert math.isclose(one.intermediate_values[epoch], value, rel_tol=1e-5)
