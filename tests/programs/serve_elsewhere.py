"""Convert an export and run what comes out of it, in a process of its own.

    python serve_elsewhere.py lite|onnx EXPORT INPUTS.json RESULT.json

INPUTS: values by input name. RESULT: {"inputs": [names], "outputs": {name: values}}.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

kind, export, inputs_path, result_path = sys.argv[1:]
values = {
    k: np.asarray(v, np.float32) for k, v in json.loads(Path(inputs_path).read_text()).items()
}
result: dict[str, Any]
if kind == "lite":
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_saved_model(export, signature_keys=["serving_default"])
    interpreter = tf.lite.Interpreter(model_content=converter.convert())
    run = interpreter.get_signature_runner("serving_default")
    result = {"inputs": sorted(run.get_input_details()), "outputs": run(**values)}
else:
    import onnxruntime

    session = onnxruntime.InferenceSession(export)
    names = [output.name for output in session.get_outputs()]
    found = session.run(None, values)
    result = {
        "inputs": sorted(i.name for i in session.get_inputs()),
        "outputs": dict(zip(names, found, strict=True)),
    }
result["outputs"] = {k: np.asarray(v).tolist() for k, v in result["outputs"].items()}
Path(result_path).write_text(json.dumps(result))
assert "tfmw" not in sys.modules
