"""Which packages are installed, and which devices TensorFlow sees."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

_TIMEOUT_S = 120

# In another process: importing TensorFlow may crash, and it prints notices to stderr.
_ASK_TENSORFLOW = """
import json, keras, tensorflow as tf
details = tf.config.experimental.get_device_details
gpus = tf.config.list_physical_devices("GPU")
print(json.dumps([keras.backend.backend(),
                  [str(details(g).get("device_name", g.name)) for g in gpus]]))
"""


def ask_tensorflow(python: str = sys.executable) -> tuple[str, str]:
    """(Keras backend, GPUs that TensorFlow sees), or why they are unknown."""
    try:
        result = subprocess.run(
            [python, "-c", _ASK_TENSORFLOW], capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return ("unknown", f"unknown: importing TensorFlow took more than {_TIMEOUT_S} s")
    if result.returncode != 0:
        last = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[-1]
        return ("unknown", f"unknown: TensorFlow can't be imported: {last}")
    backend, gpus = json.loads(result.stdout.splitlines()[-1])
    return backend, ", ".join(gpus) or "none"


def version(package: str) -> str:
    """The installed version of a package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
