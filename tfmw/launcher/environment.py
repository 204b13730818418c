"""The folder of a run, and the environment variables that all of its tasks get."""

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


def make_run_directory(log_dir: str | os.PathLike[str] | None) -> Path:
    """A new folder for this run: <log_dir>/20260131-120000-4242, or a temporary one."""
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
    """What all tasks get; `Attempt` adds what differs."""
    env = dict(environ)
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's greetings, once per task
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
    """A secret of this launcher's tasks, by which they know each other (`Listener`).

    One for all runs of a process: processes that wait to become tasks have it already.
    """
    return secrets.token_hex(32)


def compute_with_onednn(env: MutableMapping[str, str]) -> None:
    """Has TensorFlow use oneDNN's kernels, as it does by itself on newer x86 processors only.

    TensorFlow decides when it is imported, so a script could not. On processors with AVX2 alone
    its own kernels make a step of ResNet50 2.4 times as long (bench/steps.py).
    """
    if platform.machine() in ("x86_64", "AMD64"):
        env.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
