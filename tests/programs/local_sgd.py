"""Trains by local SGD and DiLoCo in many ways; writes the weights and histories of each.

Two workers, with `--more` in more ways, or with `--devices` one process with two virtual devices.
With `--machines abab` the letters are the machines of four workers.
"""

import hashlib
import sys
from typing import Any

import keras
import numpy as np

import tfmw
from tests.programs._result import write
from tests.programs.several_devices import several_devices
from tfmw.train.mirrored.collectives import listener

DILOCO = {
    "class_name": "SGD",
    "config": {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True},
}
RANDOM = np.random.default_rng(0)
# 7 batches of 17 and one of a single example: shares of two workers differ, and one has none.
X = RANDOM.normal(size=(120, 6)).astype("float32")
Y = (X @ RANDOM.normal(size=(6, 1))).astype("float32") + 0.1
TWICE = [np.repeat(a[:64], 2, axis=0) for a in (X, Y)]  # each worker gets each example


class AtEpochEnd(keras.callbacks.Callback):
    """Keeps a checksum of the weights, on each worker."""

    chief_only = False

    def __init__(self):
        super().__init__()
        self.digests = []

    def on_epoch_end(self, epoch, logs=None):
        self.digests.append(digest(self.model))


def digest(model: keras.Model) -> str:
    return hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()


def made(optimizer: Any, norm: bool, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh")]
    layers += [keras.layers.BatchNormalization()] if norm else []
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"], **compiled)
    return model


def fitted(
    optimizer: Any = None,
    data: Any = (X, Y),
    batch_size: int = 17,
    norm: bool = False,
    compiled: Any = (),
    precision: str | None = None,
    strategy: Any = "auto",
    **settings: Any,
) -> dict[str, Any]:
    """Trains with these settings of `tfmw.LocalSGD` or `tfmw.DiLoCo`; without any, in each step."""
    kind = tfmw.DiLoCo if "outer_optimizer" in settings else tfmw.LocalSGD
    model = made(optimizer or keras.optimizers.SGD(0.05), norm, **dict(compiled))
    seen = AtEpochEnd()
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "epochs": 2,
        "shuffle": False,
        "verbose": 0,
    }
    options |= {"validation_data": (X, Y), "callbacks": [seen]}
    history = tfmw.fit(
        model,
        *data,
        precision=precision,
        strategy=strategy,
        sync=kind(**settings) if settings else None,
        **options,
    )
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "digest": digest(model),
        "at epoch ends": seen.digests,
        "history": history.history,
        "iterations": int(model.optimizer.iterations),
        "rate": float(model.optimizer.learning_rate),
    }


def refused(**options: Any) -> str:
    try:
        fitted(**options)
    except tfmw.UsageError as e:
        return str(e)
    return "accepted"


def on_machines(machines: str) -> None:
    rank = tfmw.init().rank
    listener.machine = lambda: ["machine", machines[rank]]
    two: dict[str, Any] = {"every": 3, "between": "machines"}
    found = {
        "mean": fitted(**two),
        "adam": fitted("adam", norm=True, **two),
        "int8": fitted(compression="int8", **two),
        "int8 of each replica": fitted(every=3, compression="int8"),
        "of each replica": fitted(every=3),
        "compiled": fitted(compiled={"jit_compile": True}, **two),
        "each step": fitted(every=1, between="machines"),
        "synchronous": fitted(),
    }
    write({"found": found, "refused": {}})


def main() -> None:
    if "--machines" in sys.argv:
        on_machines(sys.argv[-1])
        return
    devices: dict[str, Any] = {}
    if "--devices" in sys.argv:
        several_devices(2)
        devices = {"strategy": tfmw.strategies.mirrored(["CPU:0", "CPU:1"])}
    else:
        tfmw.init()
    parts: dict[str, Any] = {"fragments": 2, "overlap": 1}
    momentum = keras.optimizers.SGD(0.05, momentum=0.9)
    found = {
        "synchronous": fitted(**devices),
        "each step": fitted(every=1, **devices),
        "no rate": fitted(keras.optimizers.SGD(0.0), every=3, **devices),
        "streaming": fitted(every=4, outer_optimizer=DILOCO, **parts, **devices),
    }
    if devices or "--more" in sys.argv:
        found |= {
            "alike": fitted(momentum, TWICE, 16, every=3, **devices),
            "diloco": fitted(every=3, outer_optimizer=DILOCO, **devices),
        }
    if "--more" in sys.argv:
        found |= {
            "int8": fitted(every=3, compression="int8"),
            "float32": fitted(every=3),
            "int4": fitted(every=3, compression="int4"),
            "norm": fitted("adam", norm=True, every=3),
            "all": fitted(every=4, compression="int8", norm=True, **parts),
            "compiled": fitted(
                "adam", compiled={"jit_compile": True}, precision="mixed_bfloat16", every=3
            ),
        }
    refusals: dict[str, dict[str, Any]] = {
        "int8 without a ring": {"every": 3, "compression": "int8"} if devices else {},
        "too many fragments": {"every": 9, "fragments": 9},
        "one machine": {"every": 3, "between": "machines"},
        "averages": {"optimizer": keras.optimizers.SGD(0.1, use_ema=True), "every": 2},
    }
    said = {name: refused(**o, **devices) for name, o in refusals.items() if o}
    write({"found": found, "refused": said})


if __name__ == "__main__":
    main()
