"""Small tasks of KerasHub with random weights, and their raw data: texts and images."""

from __future__ import annotations

from typing import Any

import keras
import keras_hub
import numpy as np

TEXTS = [
    *("the quick brown fox", "a lazy dog sleeps", "the dog jumped over", "a brown dog is quick"),
    *("the fox sleeps", "over the lazy fox", "quick quick dog"),
]
LABELS: np.ndarray = np.arange(len(TEXTS)) % 2
IMAGES: np.ndarray = (
    np.random.default_rng(0).integers(0, 256, (len(TEXTS), 20, 20, 3)).astype("uint8")
)

_WORDS = sorted({word for text in TEXTS for word in text.split()})
_SIZES = {"num_layers": 1, "num_heads": 2, "hidden_dim": 4, "intermediate_dim": 8, "dropout": 0.0}


def text_classifier() -> tuple[Any, tuple[Any, ...]]:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=[*special, *_WORDS])
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=tokenizer.vocabulary_size(), max_sequence_length=8, **_SIZES
    )
    model = keras_hub.models.BertTextClassifier(
        backbone,
        num_classes=2,
        preprocessor=keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8),
        dropout=0.0,
    )
    return _compiled(model), (TEXTS, LABELS)


def causal_lm_with_lora() -> tuple[Any, tuple[Any, ...]]:
    letters = sorted(set("".join(_WORDS)))
    begins = "\u0120"  # GPT-2's letter for the space before a word
    tokens = ["!", begins, *letters, *(begins + c for c in letters), "<|endoftext|>"]
    tokenizer = keras_hub.models.GPT2Tokenizer(
        vocabulary={token: i for i, token in enumerate(tokens)},
        merges=[f"{begins} {c}" for c in letters],
    )
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=tokenizer.vocabulary_size(), max_sequence_length=12, **_SIZES
    )
    backbone.enable_lora(2)
    model = keras_hub.models.GPT2CausalLM(
        backbone,
        preprocessor=keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=12),
    )
    return _compiled(model), (TEXTS,)


def image_classifier() -> tuple[Any, tuple[Any, ...]]:
    backbone = keras_hub.models.VGGBackbone(
        stackwise_num_repeats=[1], stackwise_num_filters=[4], image_shape=(16, 16, 3)
    )
    converter = keras_hub.layers.VGGImageConverter(image_size=(16, 16), scale=1 / 255.0)
    model = keras_hub.models.VGGImageClassifier(
        backbone,
        num_classes=2,
        preprocessor=keras_hub.models.VGGImageClassifierPreprocessor(converter),
        pooling_hidden_dim=8,
        dropout=0.0,
    )
    return _compiled(model), (IMAGES, LABELS)


TASKS = (text_classifier, causal_lm_with_lora, image_classifier)


def _compiled(model: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, loss, weighted_metrics=["accuracy"], jit_compile=False)
    return model
