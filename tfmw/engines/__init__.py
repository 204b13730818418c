"""The systems that run a call's workers: this machine, Ray, Slurm, Spark.

Read `local.py` first: `tfmw.fit(..., workers=2)`, on this machine and, with `on=`, on an engine.
`pickling.py` packs models.

Read `engine.py` next: what an engine is. `ray.py`, `slurm.py`, `spark.py` and `local_jobs.py` are
engines; `folder.py` is what those with a shared folder have in common, `own_files.py` why what is
in it can be unpickled. What all of them share:
`submit.py`, the entry points, and `job.py`, what they return; `controller.py`, which restarts, and
`job_attempt.py`, one attempt; `agent.py`, the process of each task. `tfmw.remote` connects the two.

May import: `tfmw.training`, `tfmw.checkpoint`, `tfmw.remote`, and what is below them. Only `local`
and `pickling` import TensorFlow; no engine's library is imported before an engine is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfmw.engines.engine import Engine
    from tfmw.engines.job import Job
    from tfmw.engines.local_jobs import Local
    from tfmw.engines.ray import Ray
    from tfmw.engines.slurm import Slurm
    from tfmw.engines.spark import Spark

_NAMES = {
    "Engine": "tfmw.engines.engine",
    "Job": "tfmw.engines.job",
    "Local": "tfmw.engines.local_jobs",
    "Ray": "tfmw.engines.ray",
    "Slurm": "tfmw.engines.slurm",
    "Spark": "tfmw.engines.spark",
}

__all__ = ["Engine", "Job", "Local", "Ray", "Slurm", "Spark"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'tfmw.engines' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)
