"""Writes the result of a program under `run_cluster` for the test."""

import json
import os
from pathlib import Path
from typing import Any


def write(result: dict[str, Any]) -> None:
    """Leaves this task's result where the test looks for it."""
    folder = Path(os.environ["TFMW_RESULT"])
    name = os.environ["TFMW_TASK"].replace(" ", "_")
    temporary = folder / f".{name}"
    temporary.write_text(json.dumps(result))
    temporary.rename(folder / f"{name}.json")
