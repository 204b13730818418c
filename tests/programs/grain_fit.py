"""Trains on Grain's datasets: `grain_fit.py FOLDER_OF_IMAGES`. One worker uses Keras's fit."""

import sys
from collections.abc import Callable
from typing import Any

import grain
import keras
import numpy as np

import tfmw
from tests.programs import _result

X = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)


class Examples(grain.sources.RandomAccessDataSource):
    """Each row of X with its sum."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], X[index].sum(keepdims=True)


def shuffled() -> Any:
    return grain.MapDataset.source(Examples()).shuffle(seed=3)


def loader() -> Any:
    return grain.DataLoader(
        data_source=Examples(),
        sampler=grain.samplers.IndexSampler(len(X), shuffle=True, seed=2, num_epochs=1),
        operations=[grain.transforms.Batch(batch_size=8)],
    )


def images() -> Any:
    return keras.utils.image_dataset_from_directory(
        sys.argv[1], image_size=(6, 6), batch_size=4, seed=1, format="grain", verbose=False
    )


DATASETS: dict[str, Callable[[], Any]] = {
    "MapDataset": lambda: shuffled().batch(8),
    "IterDataset": lambda: shuffled().to_iter_dataset().batch(8),
    "DataLoader": loader,
    "images": images,
}


def results(name: str, fit: Any, evaluate: Any, predict: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.layers.Rescaling(0.1), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return {
        "losses": fit(model, DATASETS[name](), epochs=3, verbose=0).history["loss"],
        "evaluated": evaluate(model, DATASETS[name](), verbose=0),
        "predicted": predict(model, DATASETS[name](), verbose=0).tolist(),
    }


methods = tfmw if tfmw.init().num_workers > 1 else keras.Model
_result.write({n: results(n, methods.fit, methods.evaluate, methods.predict) for n in DATASETS})
