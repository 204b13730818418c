"""`tfmw check --kubernetes`: tests whether jobs can run on Kubernetes, by a job of one task."""

from __future__ import annotations

from tfmw.errors import TfmwError
from tfmw.launcher.engines.kubernetes import Kubernetes
from tfmw.launcher.engines.submit import launch

_OLDEST = (1, 29)  # the first that has backoffLimitPerIndex without an option of its own


def report(engine: Kubernetes) -> int:
    """Checks a cluster, and prints the first problem; returns the exit status."""
    try:
        api = engine.api()
        print(f"checking Kubernetes, namespace {api.namespace}", flush=True)
        version = ".".join(map(str, api.version()))
        if api.version() < _OLDEST:
            raise TfmwError(f"Kubernetes has version {version}: expected 1.29 or later")
        launch(_nothing, workers=1, on=engine, env={"TFMW_NO_INIT": "1"})
    except TfmwError as error:
        print(f"failed: {error}", flush=True)
        return 1
    print(f"ok: version {version}, rights, image and versions; all is well", flush=True)
    return 0


def _nothing() -> None:
    """A function that every image with tfmw has."""
