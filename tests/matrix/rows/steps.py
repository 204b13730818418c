"""Steps, losses and optimizers of the user's own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.matrix.row import Case, row
from tests.matrix.rows.common import adam, batches, classes, compiled, numbers


class _Net(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh")
        self.head = layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.hidden(x))

    def updated(self, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)


class ComputesLoss(_Net):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        self.updated(tape, loss)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


# Its logged loss is a mean over steps, each of which counts once.
@row("train_step: self.compute_loss", core=True, nightly=True)
def computes_loss() -> Case:
    return Case(compiled(ComputesLoss(), adam()), classes(), predict=None)


class Decorated(_Net):
    """A step, and a method that it calls, are functions of `tf.function`, with a condition."""

    @tf.function
    def train_step(self, data: Any) -> Any:
        x, y = data
        if tf.convert_to_tensor(self.optimizer.iterations) < 2:
            x = tf.zeros_like(x)
        return super().train_step((self.halved(x), y))

    @tf.function(jit_compile=True)
    def halved(self, x: Any) -> Any:
        return x / 2.0


@row("train_step in a tf.function", core=True)
def decorated() -> Case:
    return Case(compiled(Decorated(), adam()), classes())


class LossObject(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.tracker = keras.metrics.Mean(name="mine")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_object(y, self(x, training=True))
        self.updated(tape, loss)
        self.tracker.update_state(loss)
        return {"mine": self.tracker.result()}

    def test_step(self, data: Any) -> Any:
        x, y = data
        self.tracker.update_state(self.loss_object(y, self(x)))
        return {"mine": self.tracker.result()}


@row("train_step: keras.losses object", nightly=True, core=True)
def loss_object() -> Case:
    model = LossObject()
    model.compile(adam())
    return Case(model, classes(), predict=None)


class ListOfLosses(LossObject):
    """A tape differentiates the sum of its targets, here of a mean, a sum and a penalty."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            losses = [
                self.loss_object(y, logits),
                1e-2 * tf.reduce_sum(logits**2),
                1e-2 * tf.reduce_sum(self.hidden.kernel**2),
            ]
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(losses, variables), variables)
        self.tracker.update_state(losses[0])
        return {"mine": self.tracker.result()}


@row("train_step: a list of means and sums", core=True)
def list_of_losses() -> Case:
    model = ListOfLosses()
    model.compile(adam())
    return Case(model, classes(), evaluate=None, predict=None)


class HandWritten(_Net):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            error = self(x, training=True) - tf.one_hot(y, 3)
            loss = tf.reduce_mean(tf.square(error))
        self.updated(tape, loss)
        return {"loss": loss, "largest": tf.reduce_mean(tf.abs(error))}

    def test_step(self, data: Any) -> Any:
        x, y = data
        # By another name than "loss": for that, Keras's evaluate returns its own tracker, 0 here.
        return {"error": tf.reduce_mean(tf.square(self(x) - tf.one_hot(y, 3)))}


@row("train_step: hand-written mean", nightly=True)
def hand_written() -> Case:
    model = HandWritten()
    model.compile(adam())
    return Case(model, classes(), predict=None)


class Mixed(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.summed = keras.losses.MeanSquaredError(reduction="sum")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_object(y, y_pred) + 0.1 * tf.reduce_mean(tf.square(y_pred))
            loss += 0.01 * self.summed(tf.one_hot(y, 3), y_pred)
        self.updated(tape, loss)
        return {"total": loss}


@row("train_step: keras.losses objects and a hand-written mean", nightly=True)
def mixed() -> Case:
    model = Mixed()
    model.compile(adam(), loss="mse")
    return Case(model, classes(), evaluate=None, predict=None)


class OwnComputeLoss(_Net):
    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + 0.3 * ops.mean(ops.square(y_pred))


@row("compute_loss overridden", nightly=True)
def own_compute_loss() -> Case:
    return Case(compiled(OwnComputeLoss(), adam()), classes(), predict=None)


class CustomLoop(_Net):
    """The loss of TensorFlow's tutorial on custom training loops, in a `train_step`."""

    def __init__(self, size: Any) -> None:
        super().__init__()
        self.size = size
        self.hidden.kernel_regularizer = keras.regularizers.L2(0.1)
        self.loss_object = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
        self.tracker = keras.metrics.Mean(name="custom")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def loss_of(self, data: Any) -> Any:
        x, y = data
        per_example = self.loss_object(y, self(x, training=True))
        size = tf.shape(y)[0] if self.size == "shape" else self.size
        loss = tf.nn.compute_average_loss(per_example, global_batch_size=size)
        return loss + tf.nn.scale_regularization_loss(tf.add_n(self.losses))

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        self.updated(tape, loss)
        self.tracker.update_state(loss)
        return {"custom": self.tracker.result()}

    def test_step(self, data: Any) -> Any:
        self.tracker.update_state(self.loss_of(data))
        return {"custom": self.tracker.result()}


def _custom_loop(size: Any) -> Case:
    model = CustomLoop(size)
    model.compile(adam())
    return Case(model, classes(), predict=None)


@row("train_step: tf.nn.compute_average_loss of a global batch size", nightly=True, core=True)
def custom_loop() -> Case:
    return _custom_loop(8)


@row("train_step: tf.nn.compute_average_loss", nightly=True)
def custom_loop_without_size() -> Case:
    return _custom_loop(None)


@row("train_step: tf.nn.compute_average_loss of the batch's shape", nightly=True)
def custom_loop_of_shape() -> Case:
    return _custom_loop("shape")


class Gan(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input([2]), layers.Dense(5)])
        self.discriminator = keras.Sequential(
            [keras.Input([5]), layers.Dense(4, activation="tanh"), layers.Dense(1)]
        )
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss, self.g_loss]

    def call(self, latent: Any) -> Any:
        return self.generator(latent)

    def train_step(self, data: Any) -> Any:
        latent, real = data
        both = tf.concat([self.generator(latent), real], axis=0)
        labels = tf.concat([tf.ones_like(real[:, :1]), tf.zeros_like(real[:, :1])], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            fooled = self.discriminator(self.generator(latent))
            g_loss = self.loss_fn(tf.zeros_like(fooled), fooled)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


class ByHand(_Net):
    """Sharpness-aware descent by hand; a frozen table counts and adds up what each class gets."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(3, 3, trainable=False)
        self.table.build(None)

    def gradients(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            scores = self(x) + 0.1 * self.table(y)
            loss = tf.reduce_mean(tf.square(scores - tf.one_hot(y, 3)))
        return loss, tape.gradient(loss, self.trainable_weights), scores

    def train_step(self, data: Any) -> Any:
        x, y = data
        _, grads, scores = self.gradients(x, y)
        weights, norm = self.trainable_weights, tf.linalg.global_norm(grads)
        for variable, grad in zip(weights, grads, strict=True):
            variable.assign_add(0.05 * grad / norm)
        loss, others, _ = self.gradients(x, y)
        for variable, grad, other in zip(weights, grads, others, strict=True):
            variable.assign(variable - 0.05 * grad / norm - 0.1 * other)
        moved = tf.IndexedSlices(0.01 * (scores - self.table(y)), y)
        self.table.embeddings.value.scatter_add(moved)
        return {"error": loss, "norm": norm}

    test_step = HandWritten.test_step


@row("train_step: weights assigned by hand", core=True, nightly=True)
def by_hand() -> Case:
    model = ByHand()
    model.compile(adam())
    return Case(model, classes(), predict=None)


@row("GAN, two optimizers", nightly=True)
def gan() -> Case:
    model = Gan()
    optimizers = [adam(), adam(0.02)]
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizers[0], optimizers[1], loss)
    real, _ = numbers()
    latent = np.random.default_rng(2).normal(size=(len(real), 2)).astype("float32")
    return Case(model, batches(latent, real), evaluate=None, optimizers=optimizers)


class Kl(layers.Layer):
    def call(self, inputs: Any) -> Any:
        mean, log_variance, noise = inputs
        kl = -0.5 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        self.add_loss(0.1 * kl)
        return mean + ops.exp(0.5 * log_variance) * noise


@row("VAE with add_loss", nightly=True, core=True)
def vae() -> Case:
    x, noise = keras.Input([5]), keras.Input([2])
    hidden = layers.Dense(4, activation="tanh")(x)
    code = Kl()([layers.Dense(2)(hidden), layers.Dense(2)(hidden), noise])
    model = keras.Model([x, noise], layers.Dense(5)(code))
    model.compile(adam(), loss="mse")
    values, _ = numbers()
    # The noise is data here: one process and several would draw different numbers.
    drawn = np.random.default_rng(2).normal(size=(len(values), 2)).astype("float32")
    return Case(model, batches((values, drawn), values), predict=None)


class VaeStep(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = layers.Dense(4)
        self.decoder = layers.Dense(5, activation="sigmoid")
        self.total = keras.metrics.Mean(name="total_loss")
        self.kl = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.total, self.kl]

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x)[:, :2])

    def train_step(self, data: Any) -> Any:
        x, noise = data
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(self.encoder(x), 2, axis=1)
            decoded = self.decoder(mean + tf.exp(0.5 * log_variance) * noise)
            reconstruction = ops.mean(
                ops.sum(keras.losses.binary_crossentropy(x[..., None], decoded[..., None]), axis=1)
            )
            kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            kl = ops.mean(ops.sum(kl, axis=1))
            total = reconstruction + kl
        grads = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.total.update_state(total)
        self.kl.update_state(kl)
        return {"total": self.total.result(), "kl_loss": self.kl.result()}


@row("VAE with train_step, as in Keras's examples", nightly=True)
def vae_step() -> Case:
    model = VaeStep()
    model.compile(adam())
    x, _ = numbers()
    x = 1 / (1 + np.exp(-x))
    noise = np.random.default_rng(2).normal(size=(len(x), 2)).astype("float32")
    return Case(model, batches(x, noise), evaluate=None, predict=None)


class Siamese(keras.Model):
    """A model as in Keras's example: called on all elements of a batch, and built by the first."""

    def __init__(self) -> None:
        super().__init__()
        inputs = [keras.Input([5], name=name) for name in ("anchor", "positive", "negative")]
        embedding = layers.Dense(4, use_bias=False)  # a bias has no gradient here
        anchor, positive, negative = (embedding(x) for x in inputs)
        near = ops.sum(ops.square(anchor - positive), axis=-1)
        far = ops.sum(ops.square(anchor - negative), axis=-1)
        self.distances = keras.Model(inputs, [near, far])
        self.scale = layers.Dense(1, kernel_initializer="ones")  # built by the first call
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def call(self, inputs: Any) -> Any:
        near, far = self.distances(inputs)
        return self.scale(ops.maximum(near - far + 0.5, 0.0)[:, None])

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = self(data)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(losses)
        return {"loss": self.tracker.result()}


@row("unbuilt siamese network, train_step on triplets", nightly=True)
def siamese() -> Case:
    model = Siamese()
    model.compile(adam())
    x, _ = numbers()
    rng = np.random.default_rng(5)
    others = [rng.normal(size=x.shape).astype("float32") for _ in range(2)]
    triplets = tf.data.Dataset.from_tensor_slices((x, *others)).batch(8)
    return Case(model, triplets, evaluate=None, predict=None)
