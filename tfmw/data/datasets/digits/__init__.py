"""The UCI handwritten digits, as the TFDS dataset "tfmw_digits".

import tensorflow_datasets as tfds
import tfmw.data.datasets.digits

train = tfds.load("tfmw_digits", split="train", as_supervised=True)
"""

from tfmw.data.datasets.digits.builder import TfmwDigits

__all__ = ["TfmwDigits"]
