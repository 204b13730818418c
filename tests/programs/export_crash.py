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

module: Any = importlib.import_module("tfmw.export")
path, when = sys.argv[1:]


def die(*args):
    os._exit(77)


if when == "before_the_manifest":
    module._write_manifest = die
elif when == "between_the_renames":
    rename = tf.io.gfile.rename
    tf.io.gfile.rename = lambda *args: (rename(*args), die())
elif when == "after_them":
    replace = module._replace
    module._replace = lambda *args: (replace(*args), die())

model = keras.Sequential([keras.Input((2,), name="x"), keras.layers.Dense(1, name="y")])
model.set_weights([tf.constant([[2.0], [0.0]]), tf.constant([0.0])])
tfmw.export(model, path)
