"""Versions of installed packages, which must be the same on all tasks, and TensorFlow's devices."""

from __future__ import annotations

import contextlib
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
    """(Keras backend, GPUs that TensorFlow detects), or the reason why they are unknown."""
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


def common_versions() -> dict[str, str]:
    """The versions that must be the same on every task, by name."""
    found = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for package in ("tensorflow", "keras", "numpy", "tfmw"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, LookupError):
            found[package] = _version_of(package)
    return found


def _version_of(module: str) -> str:
    try:
        return importlib.metadata.version(module)
    # it may have another name, such as tensorflow-cpu
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version(importlib.metadata.packages_distributions()[module][0])


def version(package: str) -> str:
    """The installed version of a package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
