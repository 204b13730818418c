"""`tfmw.fit(workers=2)` within the trials of Ray Tune."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from tests.helpers.cluster import MARK, ONE_THREAD, PROGRAMS, PYTHONPATH, marked, wait_gone


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.process
def test_trials_are_as_with_one_process_though_a_worker_is_killed(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TF_CONFIG"))}
    environ |= {**ONE_THREAD, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": PYTHONPATH, MARK: mark}
    # Ray's sockets lie in there: their whole path may have 107 bytes.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short:
        done = subprocess.run(
            [sys.executable, str(PROGRAMS / "ray_tune.py"), str(tmp_path)],
            env={**environ, "RAY_TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=360,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (tmp_path / "killed").exists()
    assert len(result["trials"]) == len(result["expected"]) == 3
    for (rate, loss, whole), (expected_rate, expected) in zip(
        sorted(result["trials"]), sorted(result["expected"]), strict=True
    ):
        assert whole
        assert rate == expected_rate
        assert loss == pytest.approx(expected, rel=1e-5)
    assert result["left"] == []
    assert wait_gone(list(marked(mark)), timeout_s=20) == []
