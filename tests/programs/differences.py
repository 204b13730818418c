"""Programs as users write them, on two replicas: equal to one process, or named with their line.

Small versions of what is common: a model, its batches, and its own `train_step`. Each is trained by
Keras in one process and by tfmw on two virtual devices.
"""

from __future__ import annotations

import inspect
import random
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfmw
from tfmw.compat import models

WIDTH = 6
CLASSES = 3
BATCH = 8
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(21, WIDTH)).astype("float32")
Y = RANDOM.integers(0, CLASSES, 21)


@pytest.fixture(scope="module")
def two_replicas() -> tf.distribute.Strategy:
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def dense(units: int, activation: str | None = None) -> layers.Layer:
    return layers.Dense(units, activation=activation)


def encoder(units: int = 4) -> keras.Model:
    return keras.Sequential([keras.Input((WIDTH,)), dense(8, "tanh"), dense(units)])


class Own(keras.Model):
    """A model whose `loss_of` a hand-written step differentiates."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def loss_of(self, x: Any, y: Any) -> Any:
        raise NotImplementedError

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def own(cls: type[Own], **parts: Any) -> keras.Model:
    model = cls(**parts)
    model.build((None, WIDTH))
    model.compile(keras.optimizers.Adam(0.01))
    return model


# ---------------------------------------------------------------- equal


class VAE(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        mean, log_var = ops.split(self.encoder(x), 2, axis=1)
        z = mean + ops.exp(0.5 * log_var) * 0.3
        rebuilt = ops.mean(ops.sum(ops.square(x - self.decoder(z)), axis=1))
        divergence = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
        return rebuilt + ops.mean(ops.sum(divergence, axis=1))


def vae() -> keras.Model:
    decoder = keras.Sequential([keras.Input((2,)), dense(8, "tanh"), dense(WIDTH)])
    return own(VAE, encoder=encoder(), decoder=decoder)


class OfConstants(Own):
    """Its loss depends on the number of examples only."""

    def train_step(self, data: Any) -> Any:
        rows = ops.shape(data[0])[0]
        noise = ops.broadcast_to(ops.array([[0.5, -1.0]]), (rows, 2))
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.tanh(self.decoder(noise)))
            penalty = 0.1 * ops.sum(self.decoder(noise) ** 2)
            total = loss + penalty / ops.cast(rows, "float32")
        grads = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        return {"made": loss}


def of_constants() -> keras.Model:
    return own(OfConstants, decoder=keras.Sequential([keras.Input((2,)), dense(8), dense(WIDTH)]))


class Normalized(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        return ops.mean((self.encoder(x, training=True) - ops.sin(x)) ** 2)


def synchronized_norm() -> keras.Model:
    normalized = layers.BatchNormalization(synchronized=True)
    kernel = layers.Dense(8, use_bias=False)
    parts = [keras.Input((WIDTH,)), kernel, normalized, dense(WIDTH, "tanh")]
    return own(Normalized, encoder=keras.Sequential(parts))


class Quantizer(layers.Layer):
    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(4, 7), name="codes")

    def call(self, x: Any) -> Any:
        flat = ops.reshape(x, (-1, 4))
        similarity = ops.matmul(flat, self.table)
        distances = (
            ops.sum(flat**2, axis=1, keepdims=True)
            + ops.sum(self.table**2, axis=0)
            - 2 * similarity
        )
        chosen = ops.one_hot(ops.argmin(distances, axis=1), 7)
        codes = ops.reshape(ops.matmul(chosen, ops.transpose(self.table)), ops.shape(x))
        self.add_loss(
            0.25 * ops.mean((ops.stop_gradient(codes) - x) ** 2)
            + ops.mean((codes - ops.stop_gradient(x)) ** 2)
        )
        return x + ops.stop_gradient(codes - x)


class VQVAE(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        rebuilt = self.vqvae(x)
        return ops.mean((x - rebuilt) ** 2) / 0.7 + sum(self.vqvae.losses)


def vq_vae() -> keras.Model:
    vqvae = keras.Sequential([encoder(), Quantizer(), dense(WIDTH)])
    vqvae.build((None, WIDTH))
    return own(VQVAE, vqvae=vqvae)


class RealNVP(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        log_det = 0.0
        for coupling, mask in zip(self.couplings, ([1, 0] * 3, [0, 1] * 3), strict=True):
            kept = x * np.array(mask, "float32")
            s, t = ops.split(coupling(kept), 2, axis=1)
            gate = 1 - np.array(mask, "float32")
            s = ops.tanh(s) * gate
            x = kept + gate * (x * ops.exp(s) + t)
            log_det = log_det + ops.sum(s, axis=1)
        log_likelihood = -0.5 * ops.sum(x**2, axis=1) + log_det
        return -tf.reduce_mean(log_likelihood)


def real_nvp() -> keras.Model:
    return own(RealNVP, couplings=[encoder(2 * WIDTH), encoder(2 * WIDTH)])


class Siamese(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        anchor, positive, negative = (self.encoder(x * k) for k in (1.0, 1.1, -0.7))
        near = tf.reduce_sum(tf.square(anchor - positive), -1)
        far = tf.reduce_sum(tf.square(anchor - negative), -1)
        return tf.maximum(near - far + 0.5, 0.0)  # one value per example, as on keras.io


def siamese() -> keras.Model:
    return own(Siamese, encoder=encoder())


class GAN(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.generator = encoder(WIDTH)
        self.critic = encoder(1)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_tracker, self.g_tracker]

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def noise(self, x: Any) -> Any:
        return ops.flip(x, axis=1)  # the same with any number of replicas

    def train_step(self, data: Any) -> Any:
        x, _ = data
        size = ops.shape(x)[0]
        both = ops.concatenate([self.generator(self.noise(x)), x], axis=0)
        labels = ops.concatenate([ops.ones((size, 1)), ops.zeros((size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.critic(both))
        grads = tape.gradient(d_loss, self.critic.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.critic.trainable_weights, strict=True))
        with tf.GradientTape() as tape:
            fakes = self.critic(self.generator(self.noise(x)))
            g_loss = self.loss_fn(ops.zeros((size, 1)), fakes)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


def gan() -> keras.Model:
    model = GAN()
    model.build((None, WIDTH))
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
    return model


class WGAN(GAN):
    @property
    def metrics(self) -> list[Any]:
        return []

    def penalty(self, x: Any, fakes: Any) -> Any:
        between = x + 0.3 * (fakes - x)
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = self.critic(between, training=True)
        grads = tape.gradient(score, [between])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1]))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, data: Any) -> Any:
        x, _ = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                fakes = self.generator(self.noise(x), training=True)
                cost = tf.reduce_mean(self.critic(fakes)) - tf.reduce_mean(self.critic(x))
                d_loss = cost + 10.0 * self.penalty(x, fakes)
            grads = tape.gradient(d_loss, self.critic.trainable_weights)
            self.d_optimizer.apply_gradients(zip(grads, self.critic.trainable_weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.critic(self.generator(self.noise(x))))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


def wgan_gp() -> keras.Model:
    model = WGAN()
    model.build((None, WIDTH))
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
    return model


def deep_fm() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    ids = layers.Lambda(lambda x: ops.cast(ops.clip(x * 2 + 5, 0, 9), "int32"))(inputs)
    vectors = layers.Embedding(10, 4)(ids)
    total = layers.Lambda(
        lambda v: 0.5 * ops.sum(ops.sum(v, axis=1) ** 2 - ops.sum(v**2, axis=1), axis=1)[:, None]
    )(vectors)
    deep = dense(1)(dense(8, "relu")(layers.Flatten()(vectors)))
    outputs = dense(CLASSES)(layers.Concatenate()([total, deep]))
    return compiled(keras.Model(inputs, outputs))


def compiled(model: keras.Model, **arguments: Any) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), **{"loss": loss, **arguments})
    return model


class Distiller(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = encoder(CLASSES), encoder(CLASSES)
        self.teacher.trainable = False

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        soft = keras.losses.KLDivergence()(
            ops.softmax(self.teacher(x) / 3.0, axis=1), ops.softmax(y_pred / 3.0, axis=1)
        )
        hard = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return 0.1 * ops.mean(hard) + 0.9 * soft * 9.0


def distillation() -> keras.Model:
    model = Distiller()
    model.build((None, WIDTH))
    return compiled(model, loss=None)


class Centralized(keras.optimizers.RMSprop):
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        centered = []
        for grad, variable in grads_and_vars:
            if len(grad.shape) > 1:
                grad = grad - ops.mean(grad, axis=tuple(range(len(grad.shape) - 1)), keepdims=True)
            centered.append((grad, variable))
        return super().apply_gradients(centered)


def gradient_centralization() -> keras.Model:
    model = encoder(CLASSES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(Centralized(0.01), loss)
    return model


class Penalized(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.sum(ops.square(x)))
        self.add_loss(0.1 * ops.mean(ops.abs(x)))
        return x


def added_losses() -> keras.Model:
    return compiled(keras.Sequential([encoder(), Penalized(), dense(CLASSES)]))


class Mixup(Own):
    """Each example mixed with another variant of itself."""

    def loss_of(self, x: Any, y: Any) -> Any:
        mixed = 0.7 * x + 0.3 * ops.flip(x, axis=1)
        labels = ops.one_hot(y, CLASSES)
        labels = 0.7 * labels + 0.3 / CLASSES
        losses = keras.losses.categorical_crossentropy(
            labels, self.encoder(mixed), from_logits=True
        )
        return ops.sum(losses) / ops.cast(ops.shape(x)[0], "float32")


def mixup() -> keras.Model:
    return own(Mixup, encoder=encoder(CLASSES))


class Summed(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        return tf.reduce_sum(tf.square(self.encoder(x))) / BATCH + 0.0 * tf.reduce_sum(x)


def sum_by_hand() -> keras.Model:
    return own(Summed, encoder=encoder())


class InFunction(VAE):
    @tf.function
    def loss_of(self, x: Any, y: Any) -> Any:
        return super().loss_of(x, y)


def loss_in_a_function() -> keras.Model:
    decoder = keras.Sequential([keras.Input((2,)), dense(8, "tanh"), dense(WIDTH)])
    return own(InFunction, encoder=encoder(), decoder=decoder)


class Recurrent(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        out = self.network(x[:, :, None])
        return tf.reduce_mean(tf.square(out - x[:, :1]))


def recurrent() -> keras.Model:
    network = keras.Sequential([keras.Input((WIDTH, 1)), layers.LSTM(3), dense(1)])
    return own(Recurrent, network=network)


def normalized_batches() -> keras.Model:
    norm = layers.BatchNormalization(synchronized=True)
    return compiled(keras.Sequential([norm, encoder(CLASSES)]))


class Contrastive(Own):
    """Pairs of one batch component each, with a margin."""

    def loss_of(self, x: Any, y: Any) -> Any:
        one, other = self.encoder(x), self.encoder(ops.flip(x, axis=1))
        distance = ops.sqrt(
            ops.maximum(ops.sum(ops.square(one - other), axis=1, keepdims=True), 1e-7)
        )
        same = ops.cast(y > 0, "float32")[:, None]
        return ops.mean(
            same * ops.square(distance) + (1 - same) * ops.square(ops.maximum(1.0 - distance, 0.0))
        )


def contrastive() -> keras.Model:
    return own(Contrastive, encoder=encoder())


class ConditionalGAN(GAN):
    def noise(self, x: Any) -> Any:
        classes = ops.repeat(ops.one_hot(ops.argmax(x[:, :3], axis=1), 3), 1, axis=0)
        return ops.concatenate([ops.flip(x, axis=1)[:, :3], classes], axis=1)


def conditional_gan() -> keras.Model:
    model = ConditionalGAN()
    model.build((None, WIDTH))
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
    return model


class CycleGAN(Own):
    """Two generators and two critics in one step, by a persistent tape, with functions of Keras."""

    def train_step(self, data: Any) -> Any:
        x, _ = data
        y = ops.flip(x, axis=1)
        absolute, squared = keras.losses.MeanAbsoluteError(), keras.losses.MeanSquaredError()
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.to_y(x), self.to_x(y)
            cycle = absolute(x, self.to_x(fake_y)) + absolute(y, self.to_y(fake_x))
            same = absolute(y, self.to_y(y)) + absolute(x, self.to_x(x))
            of_real, of_fake = self.critic(y), self.critic(fake_y)
            g_loss = squared(ops.ones_like(of_fake), of_fake) + 10 * cycle + 5 * same
            d_loss = squared(ops.ones_like(of_real), of_real)
            d_loss = 0.5 * (d_loss + squared(ops.zeros_like(of_fake), of_fake))
        for loss, part in ((g_loss, self.to_y), (g_loss, self.to_x), (d_loss, self.critic)):
            grads = tape.gradient(loss, part.trainable_variables)
            part.optimizer.apply_gradients(zip(grads, part.trainable_variables, strict=True))
        return {"G_loss": g_loss, "D_loss": d_loss}


def cycle_gan() -> keras.Model:
    parts = {"to_x": encoder(WIDTH), "to_y": encoder(WIDTH), "critic": encoder(1)}
    for part in parts.values():
        part.optimizer = keras.optimizers.Adam(0.01)
    return own(CycleGAN, **parts)


def as_words(x: Any) -> Any:
    return ops.cast(ops.clip(x * 2 + 5, 0, 9), "int32")


class Transformer(layers.Layer):
    """Tokens and positions, attention, feed forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = layers.Embedding(10, 4), layers.Embedding(WIDTH, 4)
        self.attention = layers.MultiHeadAttention(2, 2)
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.forward = dense(4, "relu")

    def build(self, shape: Any) -> None:
        self.tokens.build(shape)
        self.positions.build(shape)
        self.attention.build((None, WIDTH, 4), (None, WIDTH, 4))
        for part in (*self.norms, self.forward):
            part.build((None, WIDTH, 4))

    def call(self, x: Any) -> Any:
        words = as_words(x)
        x = self.tokens(words) + self.positions(ops.arange(ops.shape(words)[-1]))
        x = self.norms[0](x + self.attention(x, x, use_causal_mask=True))
        return self.norms[1](x + self.forward(x))


def transformer() -> keras.Model:
    return compiled(
        keras.Sequential([Transformer(), layers.GlobalAveragePooling1D(), dense(CLASSES)])
    )


class MaskedLanguageModel(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Transformer(), dense(10, "softmax")
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x: Any) -> Any:
        return self.head(self.body(x))

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> Any:
        x, _ = data
        weights = ops.cast(x > 0.2, "float32")  # of the words that are masked
        with tf.GradientTape() as tape:
            loss = self.loss_fn(as_words(x), self(x, training=True), sample_weight=weights)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        self.tracker.update_state(loss, sample_weight=weights)
        return {"loss": self.tracker.result()}


def masked_language_model() -> keras.Model:
    model = MaskedLanguageModel()
    model(X[:1])
    model.compile(keras.optimizers.SGD(0.01))
    return model


class Boxes(keras.losses.Loss):
    """RetinaNet's loss: each image's sums are divided by the number of its boxes."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        classes = ops.reshape(ops.cast(y_true, "int32"), (-1, 1)) + ops.arange(2)
        y_true = ops.one_hot(classes, CLASSES + 1)
        errors = ops.sum(ops.abs(y_true - ops.reshape(y_pred, (-1, 2, CLASSES + 1))), axis=-1)
        positive = ops.cast(y_true[..., 0] < 1, "float32")
        normalizer = ops.sum(positive, axis=-1)
        errors = ops.sum(ops.where(ops.equal(positive, 1), errors, 0.0), axis=-1)
        return tf.math.divide_no_nan(errors, normalizer)


def detection() -> keras.Model:
    return compiled(encoder(2 * (CLASSES + 1)), loss=Boxes())


def ctc(y_true: Any, y_pred: Any) -> Any:
    size = ops.shape(y_true)[0]
    labels = ops.concatenate([ops.reshape(ops.cast(y_true, "int32"), (-1, 1))] * 2, axis=1)
    scores = ops.reshape(y_pred, (-1, WIDTH, CLASSES + 1))
    lengths = WIDTH * ops.ones((size,), dtype="int32")
    return ops.ctc_loss(
        labels, scores, 2 * ops.ones((size,), dtype="int32"), lengths, mask_index=CLASSES
    )


def speech() -> keras.Model:
    return compiled(encoder(WIDTH * (CLASSES + 1)), loss=ctc)


# ------------------------------------------- equal, though numbers are those of rows of a replica

ROWS = BATCH // 2  # of each replica


class Noisy(layers.Layer):
    """A layer as in NoisyNet, with a state of as many numbers as a replica has examples."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], ROWS))
        self.bias = self.add_weight(shape=(ROWS,))
        self.state = self.add_weight(shape=(ROWS,), trainable=False, initializer="zeros")

    def call(self, x: Any) -> Any:
        noise = tf.random.stateless_normal((ROWS,), [1, 2])
        self.state.assign(0.9 * self.state + 0.1 * noise)
        return x @ self.kernel + self.bias * (1 + 0.1 * noise)


class Literal(Own):
    """A sum over examples divided by a number that is that of a replica's rows."""

    def loss_of(self, x: Any, y: Any) -> Any:
        return ops.sum(ops.square(self.noisy(x))) / ROWS


class Penalties(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        noise = tf.random.stateless_normal((ROWS,), [3, 4])
        penalty = ops.sum(ops.square(self.noisy.bias + noise))
        return ops.mean(ops.square(self.noisy(x))) + penalty


def noisy(cls: type[Own] = Literal) -> keras.Model:
    layer = Noisy()
    layer.build((None, WIDTH))
    return own(cls, noisy=layer)


def noisy_penalties() -> keras.Model:
    return noisy(Penalties)


class Counts(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="counts")
        self.batches, self.fours, self.examples = (
            self.add_weight(name=name, initializer="zeros") for name in "abc"
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.batches.assign_add(1.0)
        self.fours.assign_add(float(ROWS))
        self.examples.assign_add(ops.cast(ops.shape(y_true)[0], "float32"))

    def result(self) -> Any:
        return self.batches + 100 * self.fours + 10000 * self.examples


def counters() -> keras.Model:
    return compiled(encoder(CLASSES), metrics=[Counts()])


class Imagined(GAN):
    """Draws whole batches of the size of the batch."""

    def noise(self, x: Any) -> Any:
        return tf.random.stateless_normal((ops.shape(x)[0], WIDTH), [1, 2]) * 0.0 + 1.0


def noise_of_batches() -> keras.Model:
    model = Imagined()
    model.build((None, WIDTH))
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
    return model


# ---------------------------------------------------------------- not equal


class SimCLR(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        one = ops.normalize(self.encoder(x), axis=1)
        two = ops.normalize(self.encoder(x * 1.1), axis=1)
        similarities = ops.matmul(one, ops.transpose(two)) / 0.1  # HERE
        labels = ops.arange(ops.shape(one)[0])
        losses = keras.losses.sparse_categorical_crossentropy(
            labels, similarities, from_logits=True
        )
        return ops.mean(losses)


def simclr() -> keras.Model:
    return own(SimCLR, encoder=encoder())


class NTXent(Own):
    """The NT-Xent loss with both views in one batch, as in the paper."""

    def loss_of(self, x: Any, y: Any) -> Any:
        both = tf.math.l2_normalize(
            tf.concat([self.encoder(x), self.encoder(x * 1.1)], axis=0), axis=1
        )
        scores = tf.einsum("id,jd->ij", both, both) / 0.5  # HERE
        size = tf.shape(x)[0]
        scores -= 1e9 * tf.eye(2 * size)
        labels = tf.concat([tf.range(size) + size, tf.range(size)], axis=0)
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores)
        )


def nt_xent() -> keras.Model:
    return own(NTXent, encoder=encoder())


class NNCLR(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        one = ops.normalize(self.encoder(x), axis=1)
        near = ops.argmax(ops.matmul(one, ops.transpose(self.bank)), axis=1)
        neighbours = ops.take(self.bank, near, axis=0)
        scores = ops.matmul(neighbours, ops.transpose(self.encoder(x * 1.1)))  # HERE
        return ops.mean(-ops.log(ops.diagonal(ops.softmax(scores, axis=1)) + 1e-3))


def nnclr() -> keras.Model:
    bank = keras.Variable(RANDOM.normal(size=(16, 4)).astype("float32"), trainable=False)
    return own(NNCLR, encoder=encoder(), bank=bank)


class TwoTower(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.candidates = encoder(), encoder()

    def call(self, x: Any) -> Any:
        return self.queries(x), self.candidates(x * 0.9)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        queries, candidates = y_pred
        scores = ops.matmul(queries, ops.transpose(candidates))  # HERE
        return super().compute_loss(x=x, y=ops.eye(ops.shape(scores)[0]), y_pred=scores)


def two_tower() -> keras.Model:
    model = TwoTower()
    model.build((None, WIDTH))
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, reduction="sum")
    return compiled(model, loss=loss)


def flipped_negatives(y: Any, y_pred: Any) -> Any:
    return ops.mean(ops.abs(y_pred - 0.5 * ops.flip(y_pred, axis=0)), axis=1)  # HERE


def negatives_in_a_loss() -> keras.Model:
    return compiled(encoder(), loss=flipped_negatives)


class MMD(layers.Layer):
    """A divergence of two sets of examples, added by a layer."""

    def call(self, x: Any) -> Any:
        distances = ops.sum(ops.square(x[:, None] - x[None]), axis=-1)  # HERE
        self.add_loss(ops.mean(ops.exp(-distances)))
        return x


def mmd_layer() -> keras.Model:
    return compiled(keras.Sequential([encoder(), MMD(), dense(CLASSES)]))


class MixedUp(Mixup):
    def loss_of(self, x: Any, y: Any) -> Any:
        mixed = 0.7 * x + 0.3 * ops.flip(x, axis=0)  # HERE
        return ops.mean(ops.square(self.encoder(mixed)))


def mixup_in_the_step() -> keras.Model:
    return own(MixedUp, encoder=encoder(CLASSES))


class Standardized(layers.Layer):
    def call(self, x: Any) -> Any:
        return (x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 1e-3)  # HERE


def normalized_by_hand() -> keras.Model:
    return compiled(keras.Sequential([encoder(), Standardized(), dense(CLASSES)]))


class Rooted(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        return tf.sqrt(tf.reduce_mean(tf.square(x - self.encoder(x))))  # HERE


def root_of_a_mean() -> keras.Model:
    return own(Rooted, encoder=encoder(WIDTH))


class Masked(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        mask = tf.cast(y > 0, tf.float32)
        losses = tf.reduce_sum(tf.square(self.encoder(x)), axis=1)
        return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)  # HERE


def mean_of_some() -> keras.Model:
    return own(Masked, encoder=encoder())


class Hits(keras.metrics.Metric):
    """A metric as in Keras's guide: labels [n] and predictions [n, 1] give n * n comparisons."""

    def __init__(self) -> None:
        super().__init__(name="hits")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        y_pred = ops.reshape(ops.argmax(y_pred, axis=1), (-1, 1))
        hits = ops.cast(y_true, "int32") == ops.cast(y_pred, "int32")  # HERE
        self.total.assign_add(ops.sum(ops.cast(hits, "float32")))

    def result(self) -> Any:
        return self.total


def pairs_in_a_metric() -> keras.Model:
    return compiled(encoder(CLASSES), metrics=[Hits()])


def errors(y_true: Any, y_pred: Any) -> Any:
    return ops.abs(ops.cast(y_true, "float32") - ops.sum(y_pred, axis=1, keepdims=True))  # HERE


def pairs_in_a_metric_function() -> keras.Model:
    model = encoder(CLASSES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=[errors])
    return model


# ---------------------------------------------------------------- weights and gradients by hand


class ByHand(Own):
    """A subclass updates the weights with the gradients of a mean."""

    def loss_of(self, x: Any, y: Any) -> Any:
        return ops.mean((self.encoder(x) - ops.sin(x[:, :4])) ** 2)

    def gradients(self, x: Any, y: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        grads: list[Any] = tape.gradient(loss, self.trainable_weights)
        return grads

    def train_step(self, data: Any) -> Any:
        grads = self.gradients(*data)
        self.update(grads, *data)
        return {"made": self.loss_of(*data), "norm": tf.linalg.global_norm(grads)}

    def update(self, grads: list[Any], x: Any, y: Any) -> None:
        raise NotImplementedError


class SharpnessAware(ByHand):
    """The paper's step, then gradient descent with momentum and clipping, all by hand."""

    def build(self, shape: Any) -> None:
        self.momenta = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False)
            for v in self.encoder.trainable_weights
        ]
        self.examples = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False
        )

    def update(self, grads: list[Any], x: Any, y: Any) -> None:
        weights, norm = self.encoder.trainable_weights, tf.linalg.global_norm(grads)
        steps = [grad * 0.05 / (norm + 1e-12) for grad in grads]
        for variable, step in zip(weights, steps, strict=True):
            variable.assign_add(step)
        grads, _ = tf.clip_by_global_norm(self.gradients(x, y), 0.5)
        for variable, step in zip(weights, steps, strict=True):
            variable.value.assign_sub(step)
        for variable, grad, momentum in zip(weights, grads, self.momenta, strict=True):
            momentum.assign(0.9 * momentum + grad)
            variable.assign(variable - 0.1 * momentum)
        self.examples.assign_add(ops.shape(x)[0])


def sharpness_aware() -> keras.Model:
    return own(SharpnessAware, encoder=encoder())


class Reptile(ByHand):
    def update(self, grads: list[Any], x: Any, y: Any) -> None:
        before = [tf.identity(v) for v in self.trainable_weights]
        for _ in range(3):
            for variable, grad in zip(self.trainable_weights, grads, strict=True):
                variable.assign_sub(0.1 * grad)
            grads = self.gradients(x, y)
        for variable, value in zip(self.trainable_weights, before, strict=True):
            variable.assign(value + 0.5 * (variable - value))


def reptile() -> keras.Model:
    return own(Reptile, encoder=encoder())


class Guarded(ByHand):
    """Updates by an optimizer, if all gradients are finite."""

    def update(self, grads: list[Any], x: Any, y: Any) -> None:
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in grads])
        grads = [tf.where(finite, tf.clip_by_norm(g, 0.1), tf.zeros_like(g)) for g in grads]
        self.optimizer.apply(grads, self.trainable_weights)


def guarded() -> keras.Model:
    return own(Guarded, encoder=encoder())


class MetaLearner(Guarded):
    """MAML: a loss after a step along the gradients of another, of which it has the derivative."""

    def loss_of(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = super().loss_of(x, y)
        weights = self.trainable_weights
        grads = tape.gradient(loss, weights)
        a, b, c, d = (v - 0.3 * g for v, g in zip(weights, grads, strict=True))
        outputs = ops.tanh(1.1 * x @ a + b) @ c + d
        return ops.mean((outputs - ops.sin(x[:, :4])) ** 2)


def meta_learner() -> keras.Model:
    return own(MetaLearner, encoder=encoder())


class Adversarial(Guarded):
    """Examples moved along the gradient of a mean, which is computed with that of the weights."""

    def gradients(self, x: Any, y: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.loss_of(x, y)
        by_x, *grads = tape.gradient(loss, [x, *self.trainable_weights])
        with tf.GradientTape() as tape:
            loss = self.loss_of(x + 5.0 * by_x, y)
        more = tape.gradient(loss, self.trainable_weights)
        return [a + b for a, b in zip(grads, more, strict=True)]


def adversarial() -> keras.Model:
    return own(Adversarial, encoder=encoder())


class InputPenalty(Own):
    """The squared gradients of a mean by the examples are part of the loss."""

    def loss_of(self, x: Any, y: Any) -> Any:
        loss = ops.mean((self.encoder(x) - ops.sin(x[:, :4])) ** 2)
        (grads,) = tf.gradients(loss, x)
        return loss + 10.0 * ops.mean(ops.sum(grads**2, axis=1))


def gradient_penalty() -> keras.Model:
    return own(InputPenalty, encoder=encoder())


class Hebbian(layers.Layer):
    """Learns in `call`, without a gradient."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4))

    def call(self, x: Any) -> Any:
        y, rows = x @ self.kernel, ops.cast(ops.shape(x)[0], "float32")
        learned = ops.transpose(ops.stop_gradient(x)) @ ops.stop_gradient(y)
        self.kernel.assign_add(0.01 * learned / rows)
        return y


def hebbian() -> keras.Model:
    return compiled(keras.Sequential([encoder(), Hebbian(), dense(CLASSES)]))


class Codes(Own):
    """The nearest rows of a frozen Embedding, which move towards the examples that chose them."""

    def build(self, shape: Any) -> None:
        self.codes.build((None,))

    def loss_of(self, x: Any, y: Any) -> Any:
        z, table = self.encoder(x), self.codes.embeddings
        distances = ops.sum(table**2, axis=1) - 2 * z @ ops.transpose(table)
        chosen = ops.argmin(distances, axis=1)
        code = self.codes(chosen)
        self.learn(ops.stop_gradient(z), code, chosen)
        return ops.mean((z - ops.stop_gradient(code)) ** 2)

    def learn(self, z: Any, code: Any, chosen: Any) -> None:
        self.codes.embeddings.value.scatter_add(tf.IndexedSlices(0.1 * (z - code), chosen))


def codebook(cls: type[Own] = Codes) -> keras.Model:
    return own(cls, encoder=encoder(), codes=layers.Embedding(5, 4, trainable=False))


class AddedCodes(Codes):
    """Adds to some rows in one value, which it assigns."""

    def learn(self, z: Any, code: Any, chosen: Any) -> None:
        table = self.codes.embeddings.value
        rows = tf.cast(chosen, tf.int32)[:, None]
        self.codes.embeddings.assign(tf.tensor_scatter_nd_add(table, rows, 0.1 * (z - code)))


def added_codes() -> keras.Model:
    return codebook(AddedCodes)


class MeansOfSome(Codes):
    """A ratio of sums, as in k-means."""

    def learn(self, z: Any, code: Any, chosen: Any) -> None:
        one_hot = ops.one_hot(chosen, 5)
        means = ops.transpose(one_hot) @ z / (ops.sum(one_hot, axis=0)[:, None] + 1.0)
        self.codes.embeddings.assign(means)


class MovingCodes(layers.Layer):
    """VQ-VAE by moving averages, of which it reads a quotient."""

    def build(self, shape: Any) -> None:
        self.codes = self.add_weight(shape=(5, 4), trainable=False)
        self.sizes = self.add_weight(shape=(5,), initializer="ones", trainable=False)
        self.sums = self.add_weight(shape=(5, 4), initializer="ones", trainable=False)

    def call(self, z: Any) -> Any:
        distances = ops.sum(self.codes**2, axis=1) - 2 * z @ ops.transpose(self.codes)
        one_hot = ops.one_hot(ops.argmin(distances, axis=1), 5)
        chosen = one_hot @ self.codes
        self.sizes.assign(0.9 * self.sizes + 0.1 * ops.sum(one_hot, axis=0))
        self.sums.assign(0.9 * self.sums + 0.1 * ops.transpose(one_hot) @ ops.stop_gradient(z))
        self.codes.assign(self.sums / self.sizes[:, None])
        self.add_loss(ops.mean((ops.stop_gradient(chosen) - z) ** 2))
        return z + ops.stop_gradient(chosen - z)


def moving_codes() -> keras.Model:
    return compiled(keras.Sequential([encoder(), MovingCodes(), dense(CLASSES)]))


class BrokenTies(keras.metrics.MeanMetricWrapper):
    """A metric as KerasRS's: it moves predictions by too little to change more than their order."""

    def __init__(self) -> None:
        super().__init__(self.measured, name="ties")
        self.generator = keras.random.SeedGenerator(5)

    def measured(self, y_true: Any, y_pred: Any) -> Any:
        moved = y_pred + 1e-9 * keras.random.uniform((1,), seed=self.generator)
        return keras.losses.sparse_categorical_crossentropy(y_true, moved, from_logits=True)


class MovedPredictions(keras.losses.Loss):
    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(7)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        moved = y_pred + 1e-9 * keras.random.uniform((1,), seed=self.generator)
        return keras.losses.sparse_categorical_crossentropy(y_true, moved, from_logits=True)


def seeds_outside_of_layers() -> keras.Model:
    return compiled(encoder(CLASSES), loss=MovedPredictions(), metrics=[BrokenTies()])


EQUAL = [codebook, adversarial, seeds_outside_of_layers]
EQUAL_TOO = [
    added_codes,
    *(wgan_gp, vae, sharpness_aware, of_constants, sum_by_hand, synchronized_norm),
    *(vq_vae, real_nvp, siamese, deep_fm, distillation, gradient_centralization, mixup),
    *(loss_in_a_function, recurrent, normalized_batches, contrastive, conditional_gan, cycle_gan),
    *(speech, detection, gan, added_losses, transformer, masked_language_model),
    *(reptile, guarded, meta_learner, gradient_penalty, hebbian, moving_codes),
]
STATIC = [(counters, BATCH)]
STATIC_TOO = [
    (noisy, BATCH),
    (counters, 2),
    (noisy_penalties, BATCH),
    (noise_of_batches, BATCH),
    (gan, BATCH),
    (sum_by_hand, BATCH),
]
DIFFERENT = [
    (simclr, SimCLR, "the loss of train_step compares the examples"),
    (pairs_in_a_metric, Hits, "the metric hits has one value for each pair"),
]
DIFFERENT_TOO = [
    (two_tower, TwoTower, "the loss categorical_crossentropy compares the examples"),
    (mean_of_some, Masked, "the loss of train_step is neither a sum nor a mean"),
    (nt_xent, NTXent, "the loss of train_step compares the examples"),
    (nnclr, NNCLR, "the loss of train_step compares the examples"),
    (negatives_in_a_loss, flipped_negatives, "the loss flipped_negatives compares the examples"),
    (mmd_layer, MMD, "the loss compares the examples"),
    (mixup_in_the_step, MixedUp, "the loss of train_step compares the examples"),
    (normalized_by_hand, Standardized, "the loss sparse_categorical_crossentropy "),
    (root_of_a_mean, Rooted, "the loss of train_step is neither a sum nor a mean"),
    (pairs_in_a_metric_function, errors, "the metric errors has one value for each pair"),
]


def cases(some: list[Any], more: list[Any]) -> list[Any]:
    """Parameters of a test, named by their first part: the second ones run in `make nightly`."""
    return [
        pytest.param(
            *parts, id="-".join(getattr(p, "__name__", str(p)) for p in parts[:2]), marks=marks
        )
        for which, marks in ((some, []), (more, [pytest.mark.nightly]))
        for case in which
        for parts in [case if isinstance(case, tuple) else (case,)]
    ]


def trained(
    make: Callable[[], keras.Model], strategy: Any, static: int | None = None
) -> tuple[list[Any], list[str]]:
    """(logs and weights after training, what tfmw warns of); by Keras without a strategy.

    Args:
        static: the size of batches, which their shapes have then.
    """
    keras.utils.set_random_seed(3)
    model = make()
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    data = data.batch(static or BATCH, drop_remainder=static is not None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if strategy is None:
            history = model.fit(data, epochs=1, verbose=0)
        else:
            history = tfmw.fit(model, data, epochs=1, verbose=0, strategy=strategy)
    logs = [np.asarray(v) for _, v in sorted(history.history.items())]
    said = [str(w.message) for w in caught if str(w.message).startswith("tfmw:")]
    return [*logs, *(np.asarray(w) for w in model.get_weights())], said


def is_equal(a: list[Any], b: list[Any]) -> bool:
    return all(np.allclose(x, y, rtol=1e-3, atol=1e-4) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("make", cases(EQUAL, EQUAL_TOO))
def test_equal_to_one_process_without_a_word(make: Any, two_replicas: Any) -> None:
    expected, _ = trained(make, None)
    got, said = trained(make, two_replicas)
    assert not said
    assert is_equal(got, expected)


@pytest.mark.parametrize(("make", "size"), cases(STATIC, STATIC_TOO))
def test_equal_where_the_size_of_batches_is_known(make: Any, size: int, two_replicas: Any) -> None:
    expected, _ = trained(make, None, size)
    got, said = trained(make, two_replicas, size)
    assert not said
    assert is_equal(got, expected)


@pytest.mark.parametrize(("make", "where", "words"), cases(DIFFERENT, DIFFERENT_TOO))
def test_different_and_named_with_the_line(
    make: Any, where: Any, words: str, two_replicas: Any
) -> None:
    expected, _ = trained(make, None)
    got, said = trained(make, two_replicas)
    assert not is_equal(got, expected)
    assert len(said) == 1, said
    assert re.search(words, said[0]), said
    source, first = inspect.getsourcelines(where)
    line = first + next(i for i, text in enumerate(source) if "# HERE" in text)
    assert f"{__file__}:{line}" in said[0]


class Lookups(keras.Model):
    """Sparse and ragged ids, and functions of one example at a time."""

    def __init__(self) -> None:
        super().__init__()
        regularizer = keras.regularizers.L1L2(0.01, 0.02)
        self.words = layers.Embedding(9, 4)
        self.inner = layers.Dense(4, activation="tanh", activity_regularizer=regularizer)
        self.sparse, self.head = dense(4), dense(1)

    def call(self, inputs: Any) -> Any:
        x, ragged, sparse, ids = inputs
        words = tf.ragged.map_flat_values(self.words, ragged)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = self.inner(x)
        self.add_loss(0.1 * tf.reduce_mean(tape.batch_jacobian(y, x) ** 2))
        of_pairs = tape.jacobian(y, x)  # zeros for those of different examples
        own = tf.einsum("bibj->bij", of_pairs), tf.reduce_sum(of_pairs, axis=2)
        self.add_loss(0.1 * tf.reduce_mean(own[0] * own[1]))
        table = self.words.embeddings.value
        found = tf.nn.embedding_lookup_sparse(table, ids, None, combiner="mean")
        words = tf.reduce_mean(words, axis=1) + tf.reduce_sum(words, axis=1)
        lengths = tf.cast(ragged, tf.float32)
        words += 0.1 * (tf.reduce_max(lengths, axis=1) - tf.reduce_min(lengths, axis=1))[:, None]
        sums = tf.gather(tf.reduce_sum(lengths, axis=1), lengths.value_rowids())
        shares = lengths.with_values(lengths.values / (1 + sums))
        words += 0.1 * tf.reduce_sum(shares, axis=1)[:, None]
        first = tf.RaggedTensor.from_tensor(x, lengths=ragged.row_lengths())
        words += 0.1 * tf.reduce_mean(first, axis=1)[:, None]
        given = tf.RaggedTensor.from_row_lengths(first.values, ragged.row_lengths())
        words += 0.1 * tf.reduce_max(given, axis=1)[:, None]
        numbers, count = ragged.value_rowids(), tf.shape(x, tf.int64)[0]
        numbered = tf.RaggedTensor.from_value_rowids(first.values, numbers, nrows=count)
        words += 0.1 * tf.reduce_sum(numbered, axis=1)[:, None]
        both = tf.sparse.concat(1, [sparse * x, tf.sparse.add(sparse, sparse)])
        words += 0.01 * tf.sparse.sparse_dense_matmul(both, tf.ones([2 * WIDTH, 1]))
        return self.head(y + self.sparse(sparse) + found + words)


def squares(y_true: Any, y_pred: Any) -> Any:
    return tf.vectorized_map(lambda pair: ops.mean((pair[0] - pair[1]) ** 2), (y_true, y_pred))


@pytest.mark.nightly
def test_sparse_and_ragged_batches_without_a_word(two_replicas: Any) -> None:
    rows = [list(RANDOM.integers(0, 9, n)) for n in RANDOM.integers(1, 4, len(X))]
    ragged = tf.ragged.constant(rows, dtype=tf.int32)
    sparse = tf.sparse.from_dense(np.where(X > 0, X, 0))
    inputs = (X, ragged, sparse, ragged.to_sparse())
    data = tf.data.Dataset.from_tensor_slices((inputs, X[:, :1])).batch(BATCH)

    def losses(fit: Any, **options: Any) -> list[Any]:
        keras.utils.set_random_seed(3)
        model = Lookups()
        model.compile(keras.optimizers.SGD(0.05), squares)
        history = fit(model, data, epochs=2, shuffle=False, verbose=0, **options)
        return [np.asarray(history.history["loss"]), *model.get_weights()]

    expected = losses(keras.Model.fit)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = losses(tfmw.fit, strategy=two_replicas)
    assert not [str(w.message) for w in caught if str(w.message).startswith("tfmw:")]
    assert is_equal(got, expected)


class Unreduced(Own):
    def train_step(self, data: Any) -> Any:
        each = ops.mean(self.encoder(data[0]) ** 2, axis=1)
        return {"each": each, "features": ops.mean(data[0], axis=0)}


@pytest.mark.parametrize("eager", [False, True])
def test_logs_of_single_examples_are_their_mean_and_others_stay_whole(
    eager: bool, two_replicas: Any
) -> None:
    def model() -> keras.Model:
        made = own(Unreduced, encoder=encoder())
        made.run_eagerly = eager
        return made

    (each, features, *_), _ = trained(model, None)
    (got_each, got_features, *_), said = trained(model, two_replicas)
    assert np.allclose(got_each, each.mean())
    assert np.allclose(got_features, features)
    assert features.shape[-1] == WIDTH
    assert len(said) == 1
    assert "the log each has a value for each example" in said[0]


class Queue(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        features = ops.normalize(self.encoder(x), axis=1)
        loss = -ops.mean(ops.log(ops.softmax(ops.matmul(features, ops.transpose(self.bank)))))
        self.bank.assign(ops.concatenate([features, self.bank[: -ops.shape(x)[0]]], axis=0))
        return loss


def test_queue_of_examples_in_a_weight_is_refused(two_replicas: Any) -> None:
    bank = keras.Variable(np.ones((16, 4), "float32"), trainable=False, name="bank")
    with pytest.raises(tfmw.UsageError, match=r"the variable 'bank' gets values of single exam"):
        trained(lambda: own(Queue, encoder=encoder(), bank=bank), two_replicas)


def test_assigned_value_that_replicas_cannot_combine_is_refused(two_replicas: Any) -> None:
    with pytest.raises(
        tfmw.UsageError, match=r"embeddings' is assigned in a step, and its va"
    ) as e:
        trained(lambda: codebook(MeansOfSome), two_replicas)
    assert f"{__file__}:" in str(e.value)


class Accumulated(ByHand):
    """Applies the sum of two steps' gradients, every other step."""

    def update(self, grads: list[Any], x: Any, y: Any) -> None:
        def apply() -> Any:
            self.optimizer.apply(grads, self.trainable_weights)
            return 0

        tf.cond(self.optimizer.iterations.value % 2 == 0, apply, lambda: 0)


def test_update_within_a_condition_is_refused(two_replicas: Any) -> None:
    with pytest.raises(tfmw.UsageError, match=r"applies gradients.* within tf.cond.*gradient_accu"):
        trained(lambda: own(Accumulated, encoder=encoder()), two_replicas)


class Differentiated(Own):
    """A loss with the derivative of an embedding's sparse gradient."""

    def build(self, shape: Any) -> None:
        self.words.build(None)

    def loss_of(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = ops.mean(self.words(tf.cast(y, tf.int32)) ** 2)
        (grad,) = tape.gradient(loss, self.words.trainable_weights)
        return loss + ops.mean(tf.clip_by_norm(grad.values, 0.1) ** 2)


def test_derivative_of_a_sparse_gradient_is_refused(two_replicas: Any) -> None:
    with pytest.raises(tfmw.UsageError, match=r"differentiates the sparse gradient.*to_tensor"):
        trained(lambda: own(Differentiated, words=layers.Embedding(3, 4)), two_replicas)


class Shaken(ByHand):
    def update(self, grads: list[Any], x: Any, y: Any) -> None:
        for variable in self.trainable_weights:
            variable.assign_add(tf.random.normal(variable.shape))
        own_bias = tf.distribute.get_replica_context().all_gather(
            self.trainable_weights[-1].value[None], axis=0
        )
        self.spread.assign(ops.max(own_bias, axis=0) - ops.min(own_bias, axis=0))


@pytest.mark.nightly
def test_random_value_is_that_of_one_replica(two_replicas: Any) -> None:
    spread = keras.Variable(np.ones(4, "float32"), trainable=False, name="spread")
    model = own(Shaken, encoder=encoder(), spread=spread)
    before = model.get_weights()
    tfmw.fit(model, X, Y, batch_size=BATCH, verbose=0, strategy=two_replicas)
    assert not np.asarray(spread).any()
    assert np.abs(model.get_weights()[0] - before[0]).min() > 0


class Counted(Own):
    def loss_of(self, x: Any, y: Any) -> Any:
        return ops.sum(self.encoder(x)) / x.shape[0]


def test_size_of_a_batch_as_a_number_is_refused_with_what_to_write(two_replicas: Any) -> None:
    """The size would be that of a replica's shard, and the graph has no number for the batch."""
    with pytest.raises(Exception, match="None") as caught:
        trained(lambda: own(Counted, encoder=encoder()), two_replicas, BATCH)
    notes = [note for error in _causes(caught.value) for note in getattr(error, "__notes__", ())]
    assert any("use keras.ops.shape(x)[0]" in note for note in notes)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# ------------------------------------------------- variables that Keras does not track

ONES: list[Any] = [np.ones([8, 2], "float32"), np.ones([8, 1], "float32")]


class Noise(layers.Layer):
    def call(self, x: Any) -> Any:
        return 0 * x + keras.random.uniform([1])


def test_draws_without_a_seed_differ_between_replicas_and_steps(two_replicas: Any) -> None:
    found, python = [], []
    for predict, options in ((keras.Model.predict, {}), (tfmw.predict, {"strategy": two_replicas})):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input([2]), Noise()])
        keras.utils.set_random_seed(4)
        calls = [predict(model, ONES[0], batch_size=4, verbose=0, **options) for _ in range(2)]
        found.append(np.concatenate(calls)[:, 0].tolist())
        python.append(random.random())
    expected, ours = found
    assert ours[0::4] == expected[0::4], "replica 0 draws as one process does"
    assert ours[0] == ours[2] != ours[1] == ours[3], "batches of 4, every other one of a replica"
    assert len(set(ours)) == 8, "2 calls of 2 steps on 2 replicas"
    assert python[0] == python[1], "Python's generator is as Keras leaves it"


class Counting(keras.Model):
    """Assigns a tf.Variable, deep in an attribute, in each step or by a callback."""

    def __init__(self, in_step: bool):
        super().__init__()
        self.dense = dense(1)
        self.counts = [{"steps": tf.Variable(0.0)}]
        self.in_step = in_step

    def call(self, x: Any) -> Any:
        return self.dense(x) + self.counts[0]["steps"]

    def train_step(self, data: Any) -> Any:
        if self.in_step:
            self.counts[0]["steps"].assign_add(1.0)
        return super().train_step(data)


def test_variable_that_a_step_assigns_is_refused_by_its_attribute(two_replicas: Any) -> None:
    model = Counting(in_step=True)
    model.compile("sgd", "mse")
    with pytest.raises(tfmw.UsageError, match=r"'counts' of layer.*add_weight"):
        tfmw.fit(model, ONES[0], ONES[1], verbose=0, strategy=two_replicas)


def test_variable_that_a_callback_assigns_counts(two_replicas: Any) -> None:
    """A callback may assign it, as there is one process."""
    model = Counting(in_step=False)
    model.compile("sgd", "mse")
    steps = model.counts[0]["steps"]
    x, y = ONES
    add = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: steps.assign_add(1.0))
    tfmw.fit(model, x, y, epochs=2, verbose=0, strategy=two_replicas, callbacks=[add])
    assert float(steps.numpy()) == 2


class ScaledLoss(keras.losses.Loss):
    """A loss with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = tf.Variable(1.0, name="scale")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        error = (y_true - y_pred) ** 2
        self.scale.assign(0.9 * self.scale + 0.1 * tf.reduce_mean(error))
        return tf.reduce_mean(error, axis=1) / self.scale


@pytest.mark.parametrize("eager", [False, True])
def test_variable_that_the_model_does_not_hold_is_refused(eager: bool, two_replicas: Any) -> None:
    model = keras.Sequential([keras.Input([2]), dense(1)])
    model.compile("sgd", ScaledLoss(), run_eagerly=eager)
    with pytest.raises(tfmw.UsageError, match=r"assigns the variable 'scale:0'.*does not hold"):
        tfmw.fit(model, ONES[0], ONES[1], verbose=0, strategy=two_replicas)


@pytest.mark.nightly
def test_saved_model_that_is_trained_is_refused(two_replicas: Any, tmp_path: Path) -> None:
    encoder().export(tmp_path, verbose=False)
    saved = layers.TFSMLayer(str(tmp_path), call_endpoint="serve", name="saved")
    model = compiled(keras.Sequential([keras.Input((WIDTH,)), saved, dense(CLASSES)]))
    with pytest.raises(tfmw.UsageError, match="the layer 'saved' is a TFSMLayer that is trained"):
        tfmw.fit(model, X, Y, verbose=0, strategy=two_replicas)
    assert np.isfinite(tfmw.evaluate(model, X, Y, verbose=0, strategy=two_replicas))
    saved.trainable = False
    model = compiled(model)
    before = model.get_weights()
    tfmw.fit(model, X, Y, verbose=0, strategy=two_replicas)
    changed = [not np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)]
    assert sum(changed) == 2, "kernel and bias of the layer behind it"


class OwnOptimizer(keras.Model):
    """Compiled without an optimizer, as a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = dense(1)
        self.own = keras.optimizers.Adam()

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        self.own.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.compute_metrics(x, y, self(x))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of Keras's scheduler of rates
def test_default_optimizer_that_no_step_uses_stays_unbuilt(two_replicas: Any) -> None:
    gan, (x, y) = OwnOptimizer(), ONES
    gan.compile(loss="mse", metrics=["mae"])
    rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    options: dict[str, Any] = {"verbose": 0, "strategy": two_replicas}
    for _ in range(2):
        tfmw.fit(gan, x, y, epochs=2, callbacks=[rates], **options)
    tfmw.evaluate(gan, x, y, **options)
    assert int(gan.own.iterations.numpy()) == 4
    assert len(gan.optimizer.variables) == 2, "as in Keras: iterations and learning rate"
    assert not models.needs_build(gan), "no call traces the step again to build it"
