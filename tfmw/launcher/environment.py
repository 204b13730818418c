"""The folder of a run, and the environment variables of its tasks, such as their GPUs."""

from __future__ import annotations

import functools
import itertools
import os
import platform
import re
import secrets
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from tfmw.cluster.cluster import TOKEN
from tfmw.errors import UsageError
from tfmw.launcher.spawn import terminal_size
from tfmw.observe import task_process
from tfmw.observe.goodput import CLOCK_ZERO, clock_zero

VISIBLE = "CUDA_VISIBLE_DEVICES"

_DEVICES = Path("/dev")  # NVIDIA's driver lists GPUs there: nvidia0, nvidia1, ...


def require_working_directory() -> str:
    """This process's working directory.

    Raises:
        UsageError: the directory has been deleted.
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
        if log_dir is None:
            raise UsageError(
                f"no temporary folder can be made ({error.strerror}): make room in the directory "
                "that TMPDIR names, or name another with TMPDIR."
            ) from error
        raise UsageError(
            f"no folder can be made in the log directory {log_dir}: {error.strerror}; "
            "name another with --log-dir."
        ) from error
    raise AssertionError("unreachable")


def task_environment(environ: Mapping[str, str], terminal: bool) -> dict[str, str]:
    """Variables that all tasks share; `Attempt` adds those that differ."""
    env = dict(environ)
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides TensorFlow's notices in each task
    compute_with_onednn(env)
    env.setdefault(TOKEN, _token())
    env["PYTHONUNBUFFERED"] = "1"
    env[CLOCK_ZERO] = str(clock_zero())
    env.pop("TFMW_TTY", None)
    env.pop(task_process.VARIABLE, None)  # this launcher may itself run in a task
    if terminal:
        env["TFMW_TTY"] = "1"
        env.setdefault("COLUMNS", str(terminal_size().columns))
    return env


@functools.cache
def _token() -> str:
    """A secret with which this launcher's tasks authenticate each other (`Listener`).

    It is the same for all runs of a process, because its fork server is kept between runs.
    """
    return secrets.token_hex(32)


def compute_with_onednn(env: MutableMapping[str, str]) -> None:
    """Enables oneDNN's kernels, which TensorFlow enables by default on newer x86 processors only.

    TensorFlow reads the variable when it is imported, before a script could set it. On processors
    with AVX2 alone, its other kernels make a step of ResNet50 2.4 times as long (bench/steps.py).
    """
    if platform.machine() in ("x86_64", "AMD64"):
        env.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def visible_devices(
    rank: int | None, tasks: int, environ: Mapping[str, str], devices: Path = _DEVICES
) -> dict[str, str]:
    """The variable that limits a task to its share of the GPUs, all shares of one size.

    Args:
        rank: rank of the task among the training tasks of this host, from 0; None: it does not
            train.
        tasks: number of training tasks on this host.
        environ: environment; a list in its CUDA_VISIBLE_DEVICES is divided.
        devices: the directory of the GPUs' files.

    Returns:
        CUDA_VISIBLE_DEVICES; empty for a single task, and if there are fewer GPUs than tasks. A
        task that does not train gets no GPU, as TensorFlow allocates all the memory of visible
        GPUs.
    """
    if rank is None:
        return {VISIBLE: ""}
    gpus = visible_gpus(environ, devices)
    share = _share(gpus, tasks)
    if tasks == 1 or not share:
        return {}
    return {VISIBLE: ",".join(gpus[rank * share : (rank + 1) * share])}


def gpu_note(tasks: int, environ: Mapping[str, str], devices: Path = _DEVICES) -> str:
    """One sentence if training tasks on this host share GPUs, or leave some idle; otherwise ""."""
    gpus = visible_gpus(environ, devices)
    if tasks == 1 or not gpus:
        return ""
    share = _share(gpus, tasks)
    if not share:
        return (
            f"{tasks} workers have to share GPUs, as this machine has {len(gpus)}: TensorFlow "
            "takes all memory of a GPU, and NCCL expects one GPU or more for each worker; start "
            "at most as many workers as there are GPUs, or set CUDA_VISIBLE_DEVICES= to train on "
            "processors"
        )
    idle = len(gpus) - share * tasks
    if not idle:
        return ""
    return (
        f"{idle} of {len(gpus)} GPUs stay idle: each of {tasks} workers gets {share}, as all get "
        "the same number; choose a number of workers that divides the number of GPUs"
    )


def _share(gpus: list[str], tasks: int) -> int:
    """The number of GPUs of each task. CUDA shows a process one MIG instance, the first listed."""
    share = len(gpus) // tasks
    return min(share, 1) if gpus and gpus[0].startswith("MIG-") else share


def visible_gpus(environ: Mapping[str, str], devices: Path = _DEVICES) -> list[str]:
    """The GPUs that CUDA shows, by number or UUID; it numbers those of this container from 0."""
    found = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.iterdir())
    if VISIBLE not in environ:
        return [str(number) for number in range(found)]
    listed = [gpu.strip() for gpu in environ[VISIBLE].split(",")]
    # CUDA's rules, as in torch.cuda: the first entry chooses between UUIDs and numbers; the list
    # ends at the first invalid entry; an entry that repeats an earlier one hides all.
    kind = next((kind for kind in ("GPU-", "MIG-") if listed[0].startswith(kind)), "")
    gpus: list[str] = []
    for gpu in listed:
        number = re.match(r"\+?(\d+)", gpu)
        if not kind and number is not None:
            gpu = str(int(number[1]))
        valid = gpu.startswith(kind) if kind else number and not int(gpu) >= found > 0
        if gpu in gpus:
            return []
        if not valid:
            break
        gpus.append(gpu)
    return gpus
