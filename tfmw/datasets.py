"""TensorFlow Datasets, read from many processes at once; the digits that ship with tfmw.

    from tfmw import datasets

    train = datasets.load("tfmw_digits", "train", as_supervised=True)

May import: `tfmw.data.datasets`.
"""

from tfmw.compat.downloads import one_process_at_a_time
from tfmw.data.datasets import default_data_dir, load, prepared

__all__ = ["default_data_dir", "load", "one_process_at_a_time", "prepared"]
