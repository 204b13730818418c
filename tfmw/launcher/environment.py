"""The folder of a run, and the environment variables of all of its tasks."""

from __future__ import annotations

import functools
import itertools
import os
import platform
import secrets
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from tfmw.errors import UsageError
from tfmw.launcher.spawn import terminal_size


def require_working_directory() -> str:
    """This process's working directory.

    Raises:
        UsageError: it has been deleted.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory of this process is gone ({error.strerror}): change to another "
            "one and start again."
        ) from None


def make_run_directory(log_dir: str | os.PathLike[str] | None) -> Path:
    """A new folder for this run: <log_dir>/20260131-120000-4242, or a temporary one."""
    require_working_directory()
    try:
        if log_dir is None:
            return Path(tempfile.mkdtemp(prefix="tfmw-"))
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        for suffix in itertools.chain([""], (f"-{i}" for i in itertools.count(1))):
            directory = Path(log_dir, name + suffix)
            try:
                directory.mkdir(parents=True)
                return directory
            except FileExistsError:
                if not Path(log_dir).is_dir():
                    raise
    except OSError as error:
        raise UsageError(
            f"no folder can be made in the log directory {log_dir}: {error.strerror}; "
            "name another with --log-dir."
        ) from error
    raise AssertionError("unreachable")


def task_environment(environ: Mapping[str, str], terminal: bool) -> dict[str, str]:
    """Variables that all tasks share; `Attempt` adds those that differ."""
    env = dict(environ)
    env.setdefault(
        "TF_CPP_MIN_LOG_LEVEL", "2"
    )  # hides the notices that TensorFlow prints in each task
    compute_with_onednn(env)
    env.setdefault("TFMW_TOKEN", _token())
    env["PYTHONUNBUFFERED"] = "1"
    env.pop("TFMW_TTY", None)
    if terminal:
        env["TFMW_TTY"] = "1"
        env.setdefault("COLUMNS", str(terminal_size().columns))
    return env


@functools.cache
def _token() -> str:
    """A secret with which this launcher's tasks authenticate each other (`Listener`).

    The same for all runs of a process, because its fork server is kept between runs.
    """
    return secrets.token_hex(32)


def compute_with_onednn(env: MutableMapping[str, str]) -> None:
    """Enables oneDNN's kernels, which TensorFlow enables by default on newer x86 processors only.

    TensorFlow reads the variable when it is imported, before a script could set it. On processors
    with AVX2 alone, its other kernels make a step of ResNet50 2.4 times as long (bench/steps.py).
    """
    if platform.machine() in ("x86_64", "AMD64"):
        env.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
