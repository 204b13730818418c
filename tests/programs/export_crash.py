"""Export a model and die on the way, as by SIGKILL.

python export_crash.py PATH never | before_the_manifest | between_the_renames | after_them
"""

import importlib
import os
import sys
from typing import Any

import keras
import tensorflow as tf

import tfmw
from tfmw.storage import directories

module: Any = importlib.import_module("tfmw.train.saved_model")
path, when = sys.argv[1:]


def die(*args) -> Any:
    os._exit(77)


if when == "before_the_manifest":
    module._write_manifest = die
elif when == "between_the_renames":
    rename: Any = os.rename
    os.rename = lambda *args, **kwargs: die() if rename(*args, **kwargs) is None else None
elif when == "after_them":
    replace = directories.replace
    directories.replace = lambda *args: die() if replace(*args) is None else None

model = keras.Sequential([keras.Input((2,), name="x"), keras.layers.Dense(1, name="y")])
model.set_weights([tf.constant([[2.0], [0.0]]), tf.constant([0.0])])
tfmw.export(model, path)
