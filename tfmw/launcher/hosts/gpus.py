"""Which GPUs of a host each of its tasks gets, where several tasks train on it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(
    rank: int | None, tasks: int, environ: Mapping[str, str], devices: Path = Path("/dev")
) -> dict[str, str]:
    """The variable that limits a task to its share of the GPUs, all shares of one size.

    Args:
        rank: of the task among those of this host that train, from 0; None: it does not train.
        tasks: on this host, that train.
        environ: a list in its CUDA_VISIBLE_DEVICES is what is divided.
        devices: where NVIDIA's driver lists GPUs: nvidia0, nvidia1, ...

    Returns:
        CUDA_VISIBLE_DEVICES; nothing for one task, and where there are fewer GPUs than tasks. A
        task that does not train gets no GPU, as TensorFlow takes all the memory of those it sees.
    """
    if rank is None:
        return {VISIBLE: ""}
    if VISIBLE in environ:
        gpus = [gpu for gpu in environ[VISIBLE].split(",") if gpu.strip()]
    else:
        names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.iterdir())
        gpus = sorted((name[1] for name in names if name), key=int)
    share = len(gpus) // tasks
    if tasks == 1 or not share:
        return {}
    return {VISIBLE: ",".join(gpus[rank * share : (rank + 1) * share])}
