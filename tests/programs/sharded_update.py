"""Updates the same weights by workers that shard the update and by ones that do not.

    sharded_update.py "Adam | on" constraint

"Adam | on" is that optimizer with a compiled update, on variables; a name without a bar is a model
in two calls of fit. Writes, of each, both ways: checksums of the weights and of the optimizer's
state, the weights, how they were updated, and how many elements of slots each replica held.

COLLECTIVES=grpc: over TensorFlow's collectives. DEVICES=2: that many replicas in each process.
"""

import contextlib
import hashlib
import os
import sys
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfmw
from tests.programs._result import write
from tests.programs.several_devices import several_devices
from tfmw.compat import local_updates, losses, models
from tfmw.compat.kept import kept_with
from tfmw.compat.local_updates import FUSED_UPDATE
from tfmw.compat.step_hooks import weighting_losses
from tfmw.train.mirrored import sharded_update
from tfmw.train.mirrored.collectives import connection, listener, reduction, transports
from tfmw.train.mirrored.sharded_update import ShardedUpdate

o = keras.optimizers


class Own(keras.optimizers.SGD):
    """A user's update."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_sub(variable, gradient / (1.0 + tf.norm(gradient)) * learning_rate)


class OwnApply(keras.optimizers.SGD):
    """One that wants to see all variables."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([2.0 * g for g in grads], trainable_variables)


def no_decay() -> Any:
    optimizer = o.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "SGD": lambda: o.SGD(0.1),
    "SGD, Nesterov": lambda: o.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: o.Adam(0.01),
    "Adam, amsgrad": lambda: o.Adam(0.01, amsgrad=True),
    "Adam, schedule": lambda: o.Adam(o.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "AdamW": no_decay,
    "Adamax": lambda: o.Adamax(0.01),
    "Nadam": lambda: o.Nadam(0.01),
    "RMSprop, centered": lambda: o.RMSprop(0.01, momentum=0.9, centered=True),
    "Adagrad": lambda: o.Adagrad(0.1),
    "Adadelta": lambda: o.Adadelta(0.5),
    "Ftrl": lambda: o.Ftrl(0.1),
    "Lion": lambda: o.Lion(0.003),
    "Lamb": lambda: o.Lamb(0.01),
    "Adafactor": lambda: o.Adafactor(0.01),
    "clipnorm": lambda: o.Adam(0.01, clipnorm=0.05),
    "clipvalue": lambda: o.Adam(0.01, clipvalue=0.01),
    "global_clipnorm": lambda: o.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    "average of weights": lambda: o.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulated gradients": lambda: o.Adam(0.01, gradient_accumulation_steps=2),
    "loss scaling": lambda: o.LossScaleOptimizer(o.Adam(0.01), initial_scale=8.0),
    "loss scaling, global_clipnorm": lambda: o.LossScaleOptimizer(
        o.Adam(0.01, global_clipnorm=0.05), initial_scale=2.0**125, dynamic_growth_steps=2
    ),
    "user's update": lambda: Own(0.1),
    "user's apply": lambda: OwnApply(0.1),
}
SHAPES = [(137, 29), (29,), (29, 11), (11,), (1, 5)]
STEPS = 4


def updated(name: str, fused: str, shard: bool) -> dict[str, Any]:
    """Variables after a few updates, with gradients of each worker's own."""
    os.environ[FUSED_UPDATE] = fused
    random = np.random.default_rng(0)
    weights = [
        keras.Variable(random.normal(size=s).astype("f"), name="bias"[: len(s) * 4]) for s in SHAPES
    ]
    own = np.random.default_rng(10 + cluster.index)
    gradients = [[own.normal(size=s).astype("f") for s in SHAPES] for _ in range(STEPS)]
    if name.startswith("loss scaling"):
        gradients[1][0][0, 0] = np.inf  # in one worker's part, and all leave that step out
    optimizer = OPTIMIZERS[name]()
    optimizer.build(weights)
    update = ShardedUpdate(optimizer, reduction.Reduction(strategy), shard)
    one = tf.constant(1)
    weight = losses.ReplicaWeight(one, one, uneven=False, size_known=True, in_loss=False)

    @tf.function(autograph=False)
    def step(grads: Any) -> None:
        def on_replica() -> None:
            with weighting_losses(weight):
                optimizer.apply([tf.identity(g) for g in grads], weights)  # on a device

        strategy.run(on_replica)

    with (
        local_updates.fused_update(optimizer, weights),
        local_updates.replica_local_updates(optimizer, lambda g, v, w: update.reduced(g, v)),
    ):
        for grads in gradients:
            traced = step.get_concrete_function(grads)
            update.before_steps()
            traced(grads)
    held = held_by([update])
    update.restore_whole()
    return {
        "held": held,
        "weights": digest(weights),
        "state": digest(optimizer.variables),
        "values": [np.asarray(w.value).ravel().tolist() for w in weights],
        "update": update.description,
    }


def make_model(name: str) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    layers = keras.layers
    if name == "sparse":
        model = keras.Sequential(
            [keras.Input((6,), dtype="int32"), layers.Embedding(23, 5), layers.Flatten()]
        )
        model.add(layers.Dense(3))
    else:
        constraint = keras.constraints.UnitNorm() if name == "constraint" else None
        inner = [layers.Dense(13, activation="relu", kernel_constraint=constraint)]
        if name == "assigned by a layer":
            inner = [layers.SpectralNormalization(layer) for layer in inner]
        inner += [layers.Dense(7, activation="relu"), layers.Dense(3)]
        kinds = {"own step": OwnStep, "assigned after the update": Shrinks, "interrupted": Notes}
        kind = kinds.get(name, keras.Sequential)
        model = kind([keras.Input((9,)), *inner])
    make = OPTIMIZERS.get(name, lambda: o.Adam(0.01))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make(), loss, jit_compile=name == "compiled model")
    return model


class OwnStep(keras.Sequential):
    """A step that updates in two turns."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        grads = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(list(zip(grads[:2], variables[:2], strict=True)))
        self.optimizer.apply_gradients(list(zip(grads[2:], variables[2:], strict=True)))
        return {"loss": loss}


class Shrinks(keras.Sequential):
    """A step that assigns to weights once they are updated, within a function of its own."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        variable = models.native(self.layers[0].kernel)
        tf.cond(logs["loss"] > 0, lambda: variable.assign(0.5 * variable), variable.read_value)
        return logs


class Notes(keras.Sequential):
    """A step that calls `note`."""

    note: Any = None

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        tf.py_function(lambda: self.note(), [], [])
        return logs


class Look(keras.callbacks.Callback):
    """The optimizer's state as a callback sees it after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(digest(self.model.optimizer.variables))


class Held(keras.callbacks.Callback):
    """Size of each replica's state; raises after the second step of the first call."""

    reads_optimizer = False

    def __init__(self, interrupts: bool) -> None:
        super().__init__()
        self.held: Any = None
        self.originals: list[Any] = []  # slots before the model was placed
        self.in_originals = 0  # their elements, in the first step
        self.interrupts = interrupts
        self.first = True

    def on_train_begin(self, logs: Any = None) -> None:
        self.first = True

    def note(self) -> None:
        if self.first:
            self.in_originals = sum(int(tf.size(original)) for original in self.originals)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.first = False
        self.held = held_by(list(kept_with(self.model).updates))
        self.held.append(self.in_originals)
        if self.interrupts and batch == 1:
            self.interrupts = False
            raise KeyboardInterrupt


def held_by(updates: list[ShardedUpdate]) -> list[int]:
    """Elements of slots: whole ones in the optimizer, and in the part of each replica here."""
    (update,) = updates
    whole = sum(int(tf.size(models.native(v))) for v in slots_of(update.optimizer))
    parts = [
        sum(value.shape.num_elements() for _, _, value in part.slot_values())
        for part in (update._plan.parts if update._plan else [])
    ]
    return [whole, *parts]


def slots_of(optimizer: Any) -> list[Any]:
    return [v for v in optimizer.variables if len(v.shape)]


def digest(variables: Any) -> str:
    hashed = hashlib.sha256()
    for variable in variables:
        value = np.asarray(variable.value)
        assert value.shape == tuple(variable.shape), variable.path
        hashed.update(value.tobytes())
    return hashed.hexdigest()


def trained(name: str, shard: bool) -> dict[str, Any]:
    """State of a model after two calls of fit; the second reuses the traces of the first."""
    os.environ[FUSED_UPDATE] = "auto"
    model = make_model(name)
    random = np.random.default_rng(0)
    x = (
        random.normal(size=(76, 9)).astype("f")
        if name != "sparse"
        else random.integers(0, 23, (76, 6))
    )
    data = tf.data.Dataset.from_tensor_slices((x, random.integers(0, 3, 76))).batch(12)
    look, held = Look(), Held(name == "interrupted")
    if name == "interrupted":
        model.note = held.note
    callbacks = {"between steps": [look], "interrupted": [held]}
    options: dict[str, Any] = {"callbacks": callbacks.get(name, [])}
    if name == "16 bits":
        options["gradient_compression"] = "bf16"
    for _ in range(2):
        held.originals = [models.native(v) for v in slots_of(model.optimizer)]
        with contextlib.suppress(KeyboardInterrupt):
            tfmw.fit(
                model,
                data,
                epochs=1,
                verbose=0,
                shard_optimizer=shard,
                strategy=strategy,
                **options,
            )
    return {
        "held": held.held,
        "slots": sum(v.value.shape.num_elements() for v in slots_of(model.optimizer)),
        "weights": digest(model.weights),
        "state": digest(model.optimizer.variables),
        "values": [np.asarray(w.value).ravel().tolist() for w in model.weights],
        "seen": look.seen,
        "update": sharded_update.description(model),
    }


if os.environ.get("MACHINES"):  # of two workers each: links between them are TCP
    machine = int(os.environ["TFMW_TASK"].split()[1]) // 2
    mock.patch.object(listener, "machine", return_value=[f"machine {machine}"]).start()
transports.GATHERED_PACK = 400  # several packs
devices = int(os.environ.get("DEVICES", 1))
if devices > 1:
    several_devices(devices)
cluster = tfmw.init(bytes_per_pack=2000, collectives=os.environ.get("COLLECTIVES", "auto"))
strategy = tfmw.strategies.current_strategy()
if cluster.is_single:
    strategy = tfmw.strategies.mirrored([f"CPU:{i}" for i in range(devices)])
found: dict[str, Any] = {}
for asked in sys.argv[1:]:
    name, _, how = asked.partition(" | ")
    run = [updated(name, how, s) if how else trained(name, s) for s in (False, True)]
    found[asked] = run
found["ring"] = type(connection._ring).__name__
write(found)
