"""`tfmw.fit(workers=2)` within the trials of KerasTuner."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import keras_tuner
import numpy as np
import pytest

import tfmw
from tests.helpers.cluster import ONE_THREAD, children, template_and_copies
from tests.programs._killed import KilledOnce

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Regressor(keras_tuner.HyperModel):
    """A small network; trained by tfmw on `workers` processes, or by Keras."""

    def __init__(self, workers: int | tfmw.Workers | None, killed: Path | None = None) -> None:
        super().__init__()
        self.workers = workers
        self.killed = killed

    def build(self, hp: keras_tuner.HyperParameters) -> keras.Model:
        keras.utils.set_random_seed(1)
        units = hp.Int("units", 2, 8, step=2)
        model = keras.Sequential(
            [keras.Input([4]), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(hp.Choice("rate", [0.1, 0.01])), "mse")
        return model

    def fit(self, hp: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if self.workers is None:
            return model.fit(*args, **kwargs)
        if self.killed is not None:
            kwargs["callbacks"] = [*kwargs["callbacks"], KilledOnce(str(self.killed))]
        return tfmw.fit(model, *args, workers=self.workers, **kwargs)


def searched(workers: int | tfmw.Workers | None, folder: Path, **options: Any) -> keras_tuner.Tuner:
    killed = folder if options else None
    tuner = keras_tuner.RandomSearch(
        Regressor(workers, killed),
        objective="val_loss",
        max_trials=3,
        seed=3,
        directory=folder,
        project_name=f"on {workers}",
        **options,
    )
    tuner.search(X, Y, epochs=2, batch_size=16, validation_data=(X, Y), verbose=0)
    return tuner


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of KerasTuner and h5py
@pytest.mark.process
@pytest.mark.nightly
def test_trials_have_the_scores_and_the_weights_of_one_process(tmp_path, monkeypatch, capfd):
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    expected = {t.trial_id: t.score for t in searched(None, tmp_path).oracle.trials.values()}
    capfd.readouterr()
    tuner = searched(2, tmp_path)
    scores = {t.trial_id: t.score for t in tuner.oracle.trials.values()}
    assert scores.keys() == expected.keys() == {"0", "1", "2"}
    np.testing.assert_allclose(list(scores.values()), list(expected.values()), rtol=1e-5)
    best = tuner.get_best_models()[0]
    np.testing.assert_allclose(best.evaluate(X, Y, verbose=0), min(expected.values()), rtol=1e-5)
    # The checkpoint of a trial has one writer, and nothing is reported of the others.
    assert "[worker" not in "".join(capfd.readouterr())
    with tfmw.Workers(2) as stay:
        kept = [t.score for t in searched(stay, tmp_path).oracle.trials.values()]
    np.testing.assert_allclose(kept, list(expected.values()), rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of KerasTuner and h5py
@pytest.mark.nightly
@pytest.mark.process
def test_a_trial_whose_worker_is_killed_counts_once(tmp_path, monkeypatch):
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    expected = [t.score for t in searched(None, tmp_path).oracle.trials.values()]
    tuner = searched(2, tmp_path, max_retries_per_trial=1)
    assert (tmp_path / "killed").exists()
    trials = tuner.oracle.trials.values()
    assert [trial.status for trial in trials] == ["COMPLETED"] * 3
    np.testing.assert_allclose([trial.score for trial in trials], expected, rtol=1e-5)
    # One process has imported TensorFlow for all of them; it waits for the next trial.
    assert len(template_and_copies(children(os.getpid()))[0]) == 1
