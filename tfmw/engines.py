"""The systems that run a call's workers: this machine, Kubernetes, Ray, Slurm, Spark.

    tfmw.fit(model, dataset, workers=8, on=tfmw.engines.Ray(resources={"CPU": 4}))

A class is imported when it is first used, as its library may not be installed.

May import: `tfmw.launcher.engines`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfmw.launcher.engines.engine import Engine
    from tfmw.launcher.engines.job import Job
    from tfmw.launcher.engines.kubernetes import Kubernetes
    from tfmw.launcher.engines.local_jobs import Local
    from tfmw.launcher.engines.ray import Ray
    from tfmw.launcher.engines.slurm import Slurm
    from tfmw.launcher.engines.spark import Spark

_NAMES = {
    "Engine": "tfmw.launcher.engines.engine",
    "Job": "tfmw.launcher.engines.job",
    "Kubernetes": "tfmw.launcher.engines.kubernetes",
    "Local": "tfmw.launcher.engines.local_jobs",
    "Ray": "tfmw.launcher.engines.ray",
    "Slurm": "tfmw.launcher.engines.slurm",
    "Spark": "tfmw.launcher.engines.spark",
}

__all__ = ["Engine", "Job", "Kubernetes", "Local", "Ray", "Slurm", "Spark"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'tfmw.engines' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)
