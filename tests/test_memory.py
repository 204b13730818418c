"""What tfmw has TensorFlow use on CPUs: an allocator that keeps memory, and oneDNN's kernels."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import ONE_THREAD, ROOT, tfmw_command

PROGRAM = """
import tfmw
tfmw.init()
import tensorflow as tf
kept = tf.ones([256, 1024])
try:
    print(tf.config.experimental.get_memory_info("CPU:0")["current"])
except ValueError:
    print("malloc keeps no account")
"""


def said(**chosen: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("TF_CPU_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**env, **ONE_THREAD, "PYTHONPATH": str(ROOT), **chosen},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout.strip()


def test_tensors_come_from_memory_that_is_kept():
    assert int(said()) >= 256 * 1024 * 4


def test_a_choice_of_the_users_own_stays():
    assert said(TF_CPU_ALLOCATOR_USE_BFC="0") == "malloc keeps no account"


# Elsewhere TensorFlow's own choice stays.
ASKED = "1" if platform.machine() == "x86_64" else None

WHICH_KERNELS = """
import os
print("asked:", os.environ.get("TF_ENABLE_ONEDNN_OPTS"))
if os.environ["LOOK"]:
    from tfmw import keras_compat
    print("oneDNN:", keras_compat.computes_with_onednn())
"""


@pytest.mark.parametrize(
    ("options", "chosen", "expected"),
    [
        (["--workers=1"], {"LOOK": "1"}, [f"asked: {ASKED}", f"oneDNN: {ASKED == '1'}"]),
        ([], {"LOOK": ""}, [f"asked: {ASKED}"]),
        (["--workers=1"], {"LOOK": "", "TF_ENABLE_ONEDNN_OPTS": "0"}, ["asked: 0"]),
    ],
)
def test_tasks_compute_with_onednn_unless_told_otherwise(
    tmp_path: Path, options: list[str], chosen: dict[str, str], expected: list[str]
):
    (tmp_path / "which.py").write_text(WHICH_KERNELS)
    env = {"TFMW_NO_INIT": "1", **chosen}
    with tfmw_command("run", *options, str(tmp_path / "which.py"), env=env) as process:
        output = process.communicate(timeout=100)[0]
    assert process.returncode == 0, output
    said = [line.rpartition("] ")[2] for line in output.splitlines()]
    assert [line for line in said if line.startswith(("asked", "oneDNN"))] == expected
