"""Networks and data of the benchmarks, for Keras 3, legacy Keras and PyTorch.

Numbers are made up and stay in memory, so that a step is arithmetic and communication. Everything
here is per worker: the global batch is `batch` times the number of workers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Work:
    """A network and its data.

    Attributes:
        about: description in one line.
        shape: shape of one example.
        batch: examples per worker and step.
        steps: steps per epoch; benchmarks time epochs.
        optimizer: "sgd" or "adam".
        words: size of the vocabulary where examples are sequences of word numbers; 0: images.
    """

    about: str
    shape: tuple[int, ...]
    batch: int
    steps: int
    optimizer: str = "sgd"
    words: int = 0


CLASSES = 10
EXAMPLES = 1024  # in memory, for all workers together, read again and again
WIDTH = 128  # width of the transformer

WORKS = {
    "cnn": Work("CNN, 2.8M parameters", (28, 28, 1), 64, 50),  # of TensorFlow's tutorial
    "small_cnn": Work("CNN, 347,000 parameters", (28, 28, 1), 64, 100),
    "mlp": Work("MLP, 25M parameters, Adam", (1024,), 64, 6, "adam"),
    "resnet50": Work("ResNet50, images of 32 x 32", (32, 32, 3), 8, 4),
    "transformer": Work("transformer, 1.8M parameters", (64,), 16, 10, "adam", 8000),
}


def examples(work: Work, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(x, y): x float32 or int32 [number, *shape], y int64 [number]."""
    random = np.random.default_rng(0)
    if work.words:
        x = random.integers(0, work.words, (number, *work.shape)).astype(np.int32)
    else:
        x = random.random((number, *work.shape), np.float32)
    return x, random.integers(0, CLASSES, number)


def batches(name: str, workers: int) -> Any:
    """A tf.data.Dataset of global batches, endless."""
    import tensorflow as tf

    batch = WORKS[name].batch * workers
    numbers = examples(WORKS[name], max(EXAMPLES, batch))
    return tf.data.Dataset.from_tensor_slices(numbers).repeat().batch(batch, drop_remainder=True)


def keras_network(name: str, keras: Any) -> Any:
    """The network, compiled.

    Args:
        keras: Keras 3, or tf_keras.
    """
    work, layers = WORKS[name], keras.layers
    inputs = keras.Input(work.shape, dtype="int32" if work.words else "float32")
    if name == "cnn":
        x = layers.Conv2D(32, 3, activation="relu")(inputs)
        x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    elif name == "small_cnn":
        x = layers.MaxPooling2D()(layers.Conv2D(32, 3, activation="relu")(inputs))
        x = layers.Dense(64, activation="relu")(layers.Flatten()(x))
    elif name == "mlp":
        x = layers.Dense(4096, activation="relu")(inputs)
        x = layers.Dense(4096, activation="relu")(x)
        x = layers.Dense(1024, activation="relu")(x)
    elif name == "resnet50":
        body = keras.applications.ResNet50(
            include_top=False, weights=None, input_tensor=inputs, pooling="avg"
        )
        x = body.output
    else:
        x = layers.Embedding(work.words, WIDTH)(inputs)
        for _ in range(4):
            y = layers.MultiHeadAttention(4, WIDTH // 4)(x, x)
            x = layers.LayerNormalization()(x + y)
            y = layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="relu")(x))
            x = layers.LayerNormalization()(x + y)
        x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(CLASSES)(x))
    optimizers = {"sgd": keras.optimizers.SGD(0.001), "adam": keras.optimizers.Adam(0.001)}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers[work.optimizer], loss, metrics=["accuracy"])
    return model


def torch_network(name: str) -> Any:
    """The network as a torch module; images are channels first."""
    from torch import nn

    work = WORKS[name]
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(26 * 26 * 32, 128), nn.ReLU(), nn.Linear(128, CLASSES),
        )  # fmt: skip
    if name == "small_cnn":
        return nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(13 * 13 * 32, 64), nn.ReLU(), nn.Linear(64, CLASSES),
        )  # fmt: skip
    if name == "mlp":
        return nn.Sequential(
            nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(),
            nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, CLASSES),
        )  # fmt: skip
    if name == "resnet50":
        return _torch_resnet50()
    return _torch_transformer(work)


def _torch_transformer(work: Work) -> Any:
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(work.words, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.top = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Any) -> Any:
            return self.top(self.layers(self.embedding(x)).mean(1))

    return Transformer()


def _torch_resnet50() -> Any:
    """ResNet-50 of He et al., Deep Residual Learning, 2015, table 1: 3, 4, 6, 3 blocks."""
    from torch import nn

    def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> Any:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, size, stride, size // 2), nn.BatchNorm2d(outputs)
        )

    class Block(nn.Module):
        def __init__(self, inputs: int, width: int, stride: int):
            super().__init__()
            self.body = nn.Sequential(
                convolution(inputs, width, 1, stride), nn.ReLU(),
                convolution(width, width, 3), nn.ReLU(),
                convolution(width, 4 * width, 1),
            )  # fmt: skip
            same = inputs == 4 * width and stride == 1
            self.short = nn.Identity() if same else convolution(inputs, 4 * width, 1, stride)

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.body(x) + self.short(x))

    layers = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Block(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, CLASSES))
