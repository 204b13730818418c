"""The reports of `tfmw env`, to paste in an issue, and of `tfmw check PATH`.

The first has versions, devices and the environment. Secrets are hidden: values of variables whose
names suggest a secret, and passwords inside values.

    shown("WANDB_API_KEY", "1a2b")                     # "(hidden)"
    shown("TFMW_DATA", "s3://user:1a2b@host/data")     # "s3://(hidden)@host/data"
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence

from tfmw.cluster import Cluster
from tfmw.cluster.versions import ask_tensorflow, version
from tfmw.errors import ClusterError

PACKAGES = ("tfmw", "tensorflow", "keras", "tensorflow-datasets", "numpy", "protobuf", "absl-py")
PREFIXES = ("TF_", "TFMW_", "SLURM_", "OMPI_", "PMIX_", "JOB_", "KERAS_", "CUDA_", "NCCL_", "OMP_")
NAMES = ("CLUSTER_SPEC", "SM_HOSTS", "SM_CURRENT_HOST")

HIDDEN = "(hidden)"

_NAME = re.compile("KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|JWT|AUTH|COOKIE|SIGNATURE", re.IGNORECASE)
# for example postgres://user:password@host, https://token@host
_IN_URL = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
# for example --api_key=1a2b, "password": "1a2b", ?sig=1a2b, in command lines and JSON inside
# variables
_IN_TEXT = re.compile(
    r"((?:key|token|secret|password|passwd|pwd|credentials?|jwt|sig(?:nature)?)\\*[\"']?\s*[=:]"
    r"\s*\\*[\"']?)[^\s\"'&,;\\}]+",
    re.IGNORECASE,
)


def environment(environ: Mapping[str, str]) -> str:
    """The report of `tfmw env` as lines of "name: value"."""
    backend, gpus = ask_tensorflow()
    try:
        cluster = repr(Cluster.resolve(environ))
    except ClusterError as error:
        cluster = f"wrong: {error}"
    names = [name for name in sorted(environ) if name.startswith(PREFIXES) or name in NAMES]
    facts = {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        **{package: version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "keras backend": backend,
        "gpus": gpus,
        "cluster": cluster,
        **{f"${name}": shown(name, environ[name]) for name in names},
    }
    return "\n".join(f"{name}: {value}" for name, value in facts.items())


def shown(name: str, value: str) -> str:
    """The value of an environment variable, without secrets."""
    if _NAME.search(name):
        return HIDDEN
    return _IN_TEXT.sub(rf"\1{HIDDEN}", _IN_URL.sub(HIDDEN, value))


def verify(paths: Sequence[str]) -> int:
    """Prints the problems of each path, or that it has none; returns the exit status, 0 or 1."""
    status = 0
    for path in paths:
        problems = problems_of(path)
        for problem in problems:
            print(problem)
        if problems:
            status = 1
        else:
            print(f"intact: {path}")
    return status


def problems_of(path: str) -> list[str]:
    """Sentences on the problems of a backup directory, one backup, or an export.

    Args:
        path: a value of `backup_dir=` or `export_dir=`.
    """
    from tfmw.storage.bucket import is_bucket

    if not is_bucket(path) and not os.path.isdir(path):
        return [f"not found: {path}: expected a backup_dir or an export_dir."]

    from tfmw.train.checkpoint import store  # with TensorFlow, which takes seconds and prints
    from tfmw.train.saved_model import MANIFEST, verify_export

    if is_bucket(path):
        return store.verify(path)
    names = os.listdir(path)
    if MANIFEST in names or "saved_model.pb" in names:
        return [f"damaged: {problem}" for problem in verify_export(path)]
    if calls := sorted(name for name in names if name.startswith("fit-")):  # of --backup-dir
        return [found for name in calls for found in problems_of(os.path.join(path, name))]
    if any(name.startswith("step_") for name in [*names, os.path.basename(path.rstrip("/"))]):
        return [f"damaged: {problem}" for problem in store.verify(path)]
    return [f"not known: {path} contains neither an export of tfmw nor a backup."]
