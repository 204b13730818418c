"""The report of `tfmw env`: what one needs to know to understand somebody else's trouble."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping

from tfmw import _secrets
from tfmw.cluster import Cluster
from tfmw.errors import ClusterError

PACKAGES = ("tfmw", "tensorflow", "keras", "tensorflow-datasets", "numpy", "protobuf", "absl-py")
PREFIXES = ("TF_", "TFMW_", "SLURM_", "OMPI_", "PMIX_", "JOB_", "KERAS_", "CUDA_", "NCCL_", "OMP_")
NAMES = ("CLUSTER_SPEC", "SM_HOSTS", "SM_CURRENT_HOST")

_TIMEOUT_S = 120

# Another process, because importing TensorFlow may crash, and because it greets on stderr.
_ASK_TENSORFLOW = """
import json, keras, tensorflow as tf
details = tf.config.experimental.get_device_details
gpus = tf.config.list_physical_devices("GPU")
print(json.dumps([keras.backend.backend(),
                  [str(details(g).get("device_name", g.name)) for g in gpus]]))
"""


def report(environ: Mapping[str, str]) -> str:
    """The report as lines of "name: value"."""
    return "\n".join(f"{name}: {value}" for name, value in facts(environ))


def facts(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The report as (name, value)."""
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    for package in PACKAGES:
        yield package, _version(package)
    yield "platform", platform.platform()
    yield "cores", f"{_usable_cores()} usable of {os.cpu_count()}"
    backend, gpus = ask_tensorflow()
    yield "keras backend", backend
    yield "gpus", gpus
    try:
        yield "cluster", repr(Cluster.resolve(environ))
    except ClusterError as error:
        yield "cluster", f"wrong: {error}"
    for name in sorted(environ):
        if name.startswith(PREFIXES) or name in NAMES:
            yield f"${name}", _secrets.shown(name, environ[name])


def ask_tensorflow(python: str = sys.executable) -> tuple[str, str]:
    """(Keras backend, GPUs that TensorFlow sees), or why they can't be told."""
    try:
        answer = subprocess.run(
            [python, "-c", _ASK_TENSORFLOW], capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return ("unknown", f"unknown: importing TensorFlow took more than {_TIMEOUT_S} s")
    if answer.returncode != 0:
        last = (answer.stderr.strip() or f"exit status {answer.returncode}").splitlines()[-1]
        return ("unknown", f"unknown: TensorFlow can't be imported: {last}")
    backend, gpus = json.loads(answer.stdout.splitlines()[-1])
    return backend, ", ".join(gpus) or "none"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
