"""Mark of a task's process, as its children inherit its environment but are no tasks.

    mark(description)                   # in the task, before it joins its cluster
    is_child(description)               # in a process that it has started: True
    own_path("TFMW_PROGRESS_FILE")      # there: None

multiprocessing imports the main script again in each process of a pool, so `tfmw.init()` runs again
there. A child that gets the description of another task, by TF_CONFIG for example, is that task.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

VARIABLE = "TFMW_TASK_PROCESS"
"""Variable with the process id of a task, and a checksum of its description: "4711 2766529341"."""


def mark(description: Mapping[str, Any]) -> None:
    """Marks this process as a task.

    Args:
        description: description of the cluster and this task, as JSON.
    """
    os.environ[VARIABLE] = f"{os.getpid()} {_checksum(description)}"


def is_child(
    description: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> bool:
    """Whether a task has started this process, which is no task itself.

    Args:
        description: description of the task that this process would be; None if it does not matter.
        environ: environment to read.
    """
    process, _, checksum = environ.get(VARIABLE, "").partition(" ")
    if not process or int(process) == os.getpid():
        return False
    return description is None or checksum == _checksum(description)


def own_path(variable: str) -> str | None:
    """The path of a file that the launcher has given to this task; a task's children get None."""
    return None if is_child() else os.environ.get(variable)


def _checksum(description: Mapping[str, Any]) -> str:
    return str(zlib.crc32(json.dumps(description, sort_keys=True).encode()))
