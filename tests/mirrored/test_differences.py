"""Programs as users write them, on two replicas: equal to one process, or named with their line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.cluster import ONE_THREAD, PROGRAMS, ROOT


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kept", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)]
)
def test_programs_are_equal_or_named(kept: str) -> None:
    """The test has a process of its own: virtual devices are made before TensorFlow starts."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", kept]
    run = subprocess.run(
        [*command, str(PROGRAMS / "differences.py")],
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
