"""A point of a program where it waits until a test has done something to its processes.

    hold = Hold(path)
    hold.reached("backup")     # "holds in backup of attempt 2, process 4711", as long as it is to

The file names one point, one worker, an attempt and processes: `{"point": "backup", "worker": 0,
"after": 1, "held": [4711]}`. That worker waits there, in an attempt after that one and in another
process, while the file names them.
"""

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LONGEST_S = 120.0


def hold_at(path: Path, point: str, worker: int, after: int, held: Sequence[int] = ()) -> None:
    """Names the point where a worker is to hold next, in a later attempt and another process."""
    temporary = path.with_suffix(".new")
    found = {"point": point, "worker": worker, "after": after, "held": list(held)}
    temporary.write_text(json.dumps(found))
    temporary.replace(path)


class Hold:
    """Reads the file at each point.

    Args:
        path: of the file; it need not exist.
    """

    def __init__(self, path: str):
        self._path = Path(path)

    def reached(self, point: str) -> None:
        attempt = int(os.environ.get("TFMW_ATTEMPT", 0))
        deadline = time.monotonic() + LONGEST_S
        found = self._read()
        if (
            point != found.get("point")
            or os.environ.get("TFMW_TASK") != f"worker {found['worker']}"
            or attempt <= found["after"]
            or os.getpid() in found["held"]
        ):
            return
        print(f"holds in {point} of attempt {attempt}, process {os.getpid()}", flush=True)
        while self._read() == found and time.monotonic() < deadline:
            threading.Event().wait(0.02)

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        return found
