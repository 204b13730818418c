"""Loads the model that recipes/digits.py exported, in one process without a cluster or Keras.

python recipes/predict.py --export_dir=build/digits
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import app, flags, logging

from tfmw import datasets

FLAGS = flags.FLAGS
flags.DEFINE_string("export_dir", None, "The export_dir of recipes/digits.py.")
flags.mark_flag_as_required("export_dir")

_INK = " .:-=+*#%@"


def main(argv: Sequence[str]) -> None:
    """Prints six test images as characters, and below each its label and the prediction."""
    del argv
    logging.set_verbosity(logging.WARNING)
    model = tf.saved_model.load(FLAGS.export_dir).signatures["serving_default"]
    test = datasets.load("tfmw_digits", "test", as_supervised=True).take(6).batch(6)
    images, labels = next(iter(test))
    predictions = np.argmax(model(image=images)["probabilities"], axis=-1)
    print(f"\n{FLAGS.export_dir}, loaded in a new process without any cluster:\n")
    print(draw(images.numpy()[..., 0]))
    for what, digits in (("label", labels.numpy()), ("predicted", predictions)):
        print("  ".join(f"{what} {digit}".ljust(16) for digit in digits))


def draw(images: np.ndarray) -> str:
    """Draws images side by side, two characters a pixel.

    Args:
        images: uint8 [count, 8, 8], ink from 0 to 16.
    """
    ink = np.asarray(images, int) * (len(_INK) - 1) // 16
    return "\n".join(
        "  ".join("".join(2 * _INK[pixel] for pixel in image[row]) for image in ink)
        for row in range(ink.shape[1])
    )


if __name__ == "__main__":
    app.run(main)
