"""Trains on a `PyDataset` that two threads read; notes which worker computed each batch."""

import threading
from typing import Any

import keras
import numpy as np

import tfmw
from tests.programs import _result

EPOCHS = 3
X = np.random.default_rng(0).normal(size=(58, 3)).astype(np.float32)


class Batches(keras.utils.PyDataset):
    """Batches of 5 rows, in an order that each epoch's end draws; the last batch is smaller."""

    def __init__(self, draws: bool = False, repeats: int = 1) -> None:
        super().__init__(workers=2)
        self.draws = draws
        self.order = np.tile(np.arange(len(X)), repeats)
        self.computed: list[int] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return -(-len(self.order) // 5)

    def __getitem__(self, index: int) -> Any:
        with self._lock:
            self.computed.append(index)
        if self.draws:
            np.random.random()
        rows = X[self.order[index * 5 : (index + 1) * 5]]
        return {"x": rows}, rows.sum(1, keepdims=True)

    def on_epoch_end(self) -> None:
        self.order = np.random.permutation(self.order)


def fitted(draws: bool = False, repeats: int = 1, **options: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    x = keras.Input([3], name="x")
    model = keras.Model({"x": x}, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    batches = Batches(draws, repeats)
    history = methods.fit(model, batches, epochs=EPOCHS, verbose=0, **options)
    return {
        "losses": history.history["loss"],
        "weights": model.get_weights()[0].tolist(),
        "evaluated": methods.evaluate(model, Batches(), verbose=0),
        "predicted": methods.predict(model, Batches(), verbose=0).tolist(),
        "computed": sorted(batches.computed),
    }


methods: Any = tfmw if tfmw.init().num_workers > 1 else keras.Model
_result.write(
    {
        "whole epochs": fitted(),
        # So long that no thread reads ahead to the end.
        "few steps": fitted(repeats=10, steps_per_epoch=4, shuffle=False),
        "draws": fitted(draws=True),
    }
)
