"""Constructors of each layer, and the shape of an example that it takes."""

from __future__ import annotations

import inspect
from typing import Any

import keras
from keras import layers

# Layers of two inputs.
TOGETHER = {
    *("Add", "Average", "Concatenate", "Dot", "Maximum", "Minimum", "Multiply", "Subtract"),
    *("AdditiveAttention", "Attention"),
}

# Exported classes that are no layers of a model's own step, or need what is not installed.
NOT_LAYERS_OF_A_STEP = {
    "FlaxLayer": "needs JAX",
    "JaxLayer": "needs JAX",
    "TorchModuleWrapper": "needs PyTorch",
    "TFSMLayer": "a SavedModel; not trained",
    "InputLayer": "in every model",
    "Wrapper": "a base class",
    "Pipeline": "of preprocessing layers",
    "MaxNumBoundingBoxes": "of bounding boxes",
    "GRUCell": "in RNN",
    "LSTMCell": "in RNN",
    "SimpleRNNCell": "in RNN",
    "StackedRNNCells": "in RNN",
    "RandomCrop": "Keras itself cannot evaluate a model that holds it",
    "STFTSpectrogram": "needs SciPy",
}

# Layers that draw random numbers, beside those called Random.
DRAWING = {
    *("AlphaDropout", "AugMix", "CutMix", "Dropout", "GaussianDropout", "GaussianNoise", "MixUp"),
    *("RandAugment", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D"),
}

# Layers that put values into bins: where rounding moves one over an edge, it is far off.
BINNING = {"ContrastLimitedAdaptiveHistogramEqualization", "Discretization"}

# Layers that look at the whole batch.
OF_THE_BATCH = {"BatchNormalization", "Equalization"}

# Layers that assign values which do not depend on data. At the end of data of unknown length Keras
# runs that part of a step once more.
ASSIGNING_WITHOUT_DATA = {"SpectralNormalization"}

Recipe = tuple[Any, ...]  # shape, arguments (or what makes the layer), type of the input

_IMAGE = (8, 8, 3)
_VOLUME = (4, 4, 4, 2)


def _of_dimensions(stem: str, suffix: str, arguments: dict[str, Any]) -> dict[str, Any]:
    shapes = {"1D": (8, 6), "2D": _IMAGE, "3D": _VOLUME}
    return {
        f"{stem}{size}{suffix}": {"": (shape, arguments)}
        for size, shape in shapes.items()
        if hasattr(layers, f"{stem}{size}{suffix}")
    }


class Attends(layers.Layer):
    """Self-attention: one tensor as query and value."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def call(self, x: Any) -> Any:
        return self.attention(x, x)


class CrossesWithItself(layers.Layer):
    """A cross of a feature with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.crossing = layers.HashedCrossing(num_bins=4, output_mode="one_hot")

    def call(self, x: Any) -> Any:
        return self.crossing((x, x))

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], 4)


def _adapted_normalization() -> Any:
    layer = layers.Normalization()
    layer.adapt(keras.random.normal([16, 6], seed=3))
    return layer


RECIPES: dict[str, dict[str, Recipe]] = {
    "Activation": {"": ((6,), {"activation": "gelu"})},
    "ActivityRegularization": {"": ((6,), {"l2": 0.1})},
    "BatchNormalization": {
        "": ((6,), {}),
        "synchronized": ((6,), {"synchronized": True}),
    },
    "Bidirectional": {"": ((8, 6), lambda: layers.Bidirectional(layers.LSTM(3)))},
    "CategoryEncoding": {"": ((3,), {"num_tokens": 4, "output_mode": "multi_hot"}, "int32")},
    "CenterCrop": {"": (_IMAGE, {"height": 4, "width": 4})},
    "ContrastLimitedAdaptiveHistogramEqualization": {"": (_IMAGE, {"value_range": (0, 1)})},
    "Cropping1D": {"": ((8, 6), {"cropping": 1})},
    "Cropping2D": {"": (_IMAGE, {"cropping": 1})},
    "Cropping3D": {"": (_VOLUME, {"cropping": 1})},
    "Dense": {"": ((6,), {"units": 4})},
    "Discretization": {"": ((6,), {"bin_boundaries": [0.2, 0.5]})},
    "Dot": {"": ((6,), {"axes": 1})},
    "Dropout": {"": ((6,), {"rate": 0.5})},
    "AlphaDropout": {"": ((6,), {"rate": 0.5})},
    "GaussianDropout": {"": ((6,), {"rate": 0.5})},
    "GaussianNoise": {"": ((6,), {"stddev": 0.5})},
    "EinsumDense": {"": ((8, 6), {"equation": "abc,cd->abd", "output_shape": (8, 4)})},
    "Embedding": {
        "": ((3,), {"input_dim": 4, "output_dim": 3}, "int32"),
        "of masked tokens": ((3,), {"input_dim": 4, "output_dim": 3, "mask_zero": True}, "int32"),
    },
    # Keras finds a cycle in functional models that hold the layer itself.
    "Equalization": {
        "": (_IMAGE, lambda: layers.Lambda(lambda t: layers.Equalization(value_range=(0, 1))(t)))
    },
    "GRU": {"": ((8, 6), {"units": 3})},
    "GroupNormalization": {"": ((8, 6), {"groups": 2})},
    "GroupedQueryAttention": {
        "": (
            (8, 6),
            lambda: Attends(
                layers.GroupQueryAttention(head_dim=3, num_query_heads=2, num_key_value_heads=1)
            ),
        )
    },
    "HashedCrossing": {"": ((1,), CrossesWithItself, "int32")},
    "Hashing": {"": ((1,), {"num_bins": 4, "output_mode": "one_hot"}, "int32")},
    "IntegerLookup": {"": ((1,), {"vocabulary": [1, 2], "output_mode": "one_hot"}, "int64")},
    "LSTM": {"": ((8, 6), {"units": 3})},
    "Lambda": {"": ((6,), {"function": keras.ops.square, "output_shape": (6,)})},
    "MelSpectrogram": {
        "": ((64,), {"fft_length": 16, "sequence_stride": 8, "num_mel_bins": 4, "min_freq": 0.1})
    },
    "MultiHeadAttention": {
        "": ((8, 6), lambda: Attends(layers.MultiHeadAttention(num_heads=2, key_dim=3)))
    },
    "Normalization": {
        "": ((6,), _adapted_normalization),
    },
    "Permute": {"": ((8, 6), {"dims": (2, 1)})},
    "RNN": {
        "": (
            (8, 6),
            lambda: layers.RNN([layers.GRUCell(3), layers.LSTMCell(3), layers.SimpleRNNCell(3)]),
        )
    },
    "RepeatVector": {"": ((6,), {"n": 2})},
    "Rescaling": {"": ((6,), {"scale": 2.0})},
    "Reshape": {"": ((8, 6), {"target_shape": (48,)})},
    "Resizing": {"": (_IMAGE, {"height": 4, "width": 4})},
    "ReversibleEmbedding": {"": ((3,), {"input_dim": 4, "output_dim": 3}, "int32")},
    "SimpleRNN": {"": ((8, 6), {"units": 3})},
    "Solarization": {"": (_IMAGE, {"value_range": (0, 1)})},
    "SpectralNormalization": {"": ((6,), lambda: layers.SpectralNormalization(layers.Dense(4)))},
    "StringLookup": {
        "": ((1,), {"vocabulary": ["a", "b"], "output_mode": "one_hot"}, "string"),
    },
    "TextVectorization": {
        "": ((), {"vocabulary": ["a", "b", "c"], "output_mode": "multi_hot"}, "string"),
    },
    "TimeDistributed": {"": ((8, 6), lambda: layers.TimeDistributed(layers.Dense(3)))},
    **_of_dimensions("Conv", "", {"filters": 3, "kernel_size": 2}),
    **_of_dimensions("Conv", "Transpose", {"filters": 3, "kernel_size": 2}),
    **_of_dimensions("DepthwiseConv", "", {"kernel_size": 2}),
    **_of_dimensions("SeparableConv", "", {"filters": 3, "kernel_size": 2}),
    **_of_dimensions("AveragePooling", "", {"pool_size": 2}),
    **_of_dimensions("MaxPooling", "", {"pool_size": 2}),
    **_of_dimensions("GlobalAveragePooling", "", {}),
    **_of_dimensions("GlobalMaxPooling", "", {}),
    **_of_dimensions("AdaptiveAveragePooling", "", {"output_size": 2}),
    **_of_dimensions("AdaptiveMaxPooling", "", {"output_size": 2}),
    **_of_dimensions("UpSampling", "", {}),
    **_of_dimensions("ZeroPadding", "", {}),
    **_of_dimensions("SpatialDropout", "", {"rate": 0.5}),
    "ConvLSTM1D": {"": ((3, 6, 2), {"filters": 2, "kernel_size": 2})},
    "ConvLSTM2D": {"": ((3, 4, 4, 2), {"filters": 2, "kernel_size": 2})},
    "ConvLSTM3D": {"": ((2, 3, 3, 3, 1), {"filters": 2, "kernel_size": 2})},
    "RandomBrightness": {"": (_IMAGE, {"factor": 0.2, "value_range": (0, 1)})},
    "RandomContrast": {"": (_IMAGE, {"factor": 0.2})},
    "RandomFlip": {"": (_IMAGE, {})},
    "RandomRotation": {"": (_IMAGE, {"factor": 0.1})},
    "RandomTranslation": {"": (_IMAGE, {"height_factor": 0.1, "width_factor": 0.1})},
    "RandomZoom": {"": (_IMAGE, {"height_factor": 0.1})},
}

# Other augmentations of images.
_AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "RandomColorDegeneration": {"factor": 0.5},
    "RandomHue": {"factor": 0.2},
    "RandomPosterization": {"factor": 4},
    "RandomSaturation": {"factor": 0.5},
    "RandomSharpness": {"factor": 0.5},
    "RandomShear": {"x_factor": 0.2},
}
for _name in (
    *("AugMix", "AutoContrast", "CutMix", "MixUp", "RandAugment", "RandomColorDegeneration"),
    *("RandomColorJitter", "RandomElasticTransform", "RandomErasing", "RandomGaussianBlur"),
    *("RandomGrayscale", "RandomHue", "RandomInvert", "RandomPerspective"),
    *("RandomPosterization", "RandomSaturation", "RandomSharpness", "RandomShear"),
):
    _arguments = _AUGMENTATIONS.get(_name, {})
    if "value_range" in inspect.signature(getattr(layers, _name)).parameters:
        # Values up to 255 would make the small values of these images huge.
        _arguments = {"value_range": (0, 1), **_arguments}
    RECIPES.setdefault(_name, {"": (_IMAGE, _arguments)})
