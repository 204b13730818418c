"""Load exports in a process without any cluster, by everything that loads a SavedModel.

    python load_export.py REQUESTS.json RESULT.json

REQUESTS: [{"path", "how", "inputs", "positional"}]. `how` is "signature", "serve" or the name of an
endpoint for TFSMLayer; `inputs` is a dict of lists by name, passed as it is or, with `positional`,
as the list of its values (one value: alone).
"""

import json
import sys

import keras
import tensorflow as tf


def call(path, how, inputs):
    if how.startswith("layer:"):
        return keras.layers.TFSMLayer(path, call_endpoint=how.removeprefix("layer:"))(inputs)
    loaded = tf.saved_model.load(path)
    if how == "signature":
        return loaded.signatures["serving_default"](**inputs)
    return loaded.serve(inputs)


def plain(outputs):
    if isinstance(outputs, dict):
        return {key: plain(value) for key, value in outputs.items()}
    if isinstance(outputs, list | tuple):
        return [plain(value) for value in outputs]
    values = outputs.numpy().tolist()
    return [value.decode() if isinstance(value, bytes) else value for value in values]


results = []
with open(sys.argv[1]) as file:
    requests = json.load(file)
for request in requests:
    named = {name: tf.constant(value) for name, value in request["inputs"].items()}
    values = list(named.values())
    inputs = named if not request["positional"] else values[0] if len(values) == 1 else values
    results.append(plain(call(request["path"], request["how"], inputs)))
with open(sys.argv[2], "w") as file:
    json.dump(results, file)
assert "tfmw" not in sys.modules
