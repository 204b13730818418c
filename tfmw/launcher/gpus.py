"""The division of this machine's GPUs among its tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"

_DEVICES = Path("/dev")  # NVIDIA's driver lists GPUs there: nvidia0, nvidia1, ...


def visible_devices(
    rank: int | None, tasks: int, environ: Mapping[str, str], devices: Path = _DEVICES
) -> dict[str, str]:
    """The variable that limits a task to its share of the GPUs, all shares of one size.

    Args:
        rank: of the task among those of this host that train, from 0; None: it does not train.
        tasks: on this host, that train.
        environ: a list in its CUDA_VISIBLE_DEVICES is what is divided.
        devices: the directory of the GPUs' files.

    Returns:
        CUDA_VISIBLE_DEVICES; nothing for one task, and with fewer GPUs than tasks. A task that does
        not train gets no GPU, as TensorFlow takes all the memory of those it sees.
    """
    if rank is None:
        return {VISIBLE: ""}
    gpus = _gpus(environ, devices)
    share = len(gpus) // tasks
    if tasks == 1 or not share:
        return {}
    return {VISIBLE: ",".join(gpus[rank * share : (rank + 1) * share])}


def shortage(tasks: int, environ: Mapping[str, str], devices: Path = _DEVICES) -> str:
    """One sentence if there are GPUs, but fewer than tasks that train here; else ""."""
    gpus = len(_gpus(environ, devices))
    if not 0 < gpus < tasks:
        return ""
    return (
        f"{tasks} workers have to share GPUs, as this machine has {gpus}: TensorFlow takes all "
        "memory of a GPU, and NCCL expects one GPU or more for each worker; start at most as many "
        "workers as there are GPUs, or set CUDA_VISIBLE_DEVICES= to train on processors"
    )


def _gpus(environ: Mapping[str, str], devices: Path) -> list[str]:
    if VISIBLE in environ:
        return [gpu for gpu in environ[VISIBLE].split(",") if gpu.strip()]
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.iterdir())
    return sorted((name[1] for name in names if name), key=int)
