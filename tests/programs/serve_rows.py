"""Serves a few ids from a SavedModel, without tfmw: serve_rows.py SAVED_MODEL.

Prints the outputs, and by how many bytes the peak memory of this process grew.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmHWM"].split()[0]) * 1024


tf.data.Dataset.range(9).batch(9).get_single_element()  # TensorFlow's own threads and memory
before = peak()
model = tf.saved_model.load(sys.argv[1])
ids = np.random.default_rng(0).integers(0, 1_200_000, [20, 64])
outputs = [model.serve(tf.constant(some)).numpy().tolist() for some in ids]
assert "tfmw" not in sys.modules
print(json.dumps({"grew": peak() - before, "outputs": outputs}))
