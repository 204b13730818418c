"""Programs as users write them, on two replicas: equal to one process, or named with their line."""

from __future__ import annotations

import pytest

from tests.helpers.cluster import PROGRAMS, ROOT, run_command


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kept", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)]
)
def test_programs_are_equal_or_named(kept: str) -> None:
    """The test has a process of its own: virtual devices are made before TensorFlow starts."""
    code = "import sys, pytest; raise SystemExit(pytest.main(sys.argv[1:]))"
    options = ("-q", "-p", "no:cacheprovider", "-m", kept)
    file = PROGRAMS / "differences.py"
    status, output = run_command("python", "-c", code, *options, file, cwd=ROOT, timeout_s=850)
    assert status == 0, output[-8000:]
    assert " passed" in output
