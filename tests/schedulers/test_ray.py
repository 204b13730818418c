"""`tfmw.fit` inside of Ray actors: recipes/schedulers/on_ray.py on a Ray of this machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.cluster import ONE_THREAD, ROOT
from tfmw.train.saved_model import verify_export as verify


@pytest.mark.process
@pytest.mark.nightly
def test_two_actors_train(tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TF_CONFIG"))}
    environ |= {**ONE_THREAD, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    environ.pop("TF_ENABLE_ONEDNN_OPTS", None)
    command = [sys.executable, "recipes/schedulers/on_ray.py", "--epochs=2"]
    # Ray's sockets lie in there: their whole path may have 107 bytes.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short:
        run = subprocess.run(
            [*command, f"--export_dir={tmp_path}/model"],
            cwd=ROOT,
            env={**environ, "RAY_TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert run.returncode == 0, run.stdout + run.stderr
    (accuracy,) = re.findall(r"validation accuracy: (0\.\d+)", run.stdout)
    if platform.machine() in ("x86_64", "AMD64"):
        tasks = re.findall(r"\(Worker pid=(\d+)\).* oneDNN custom operations are on", run.stderr)
        assert len(set(tasks)) == 2, run.stderr
    assert float(accuracy) > 0.5  # it trained: one of ten digits by chance
    assert verify(tmp_path / "model") == []
