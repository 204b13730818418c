"""The allocator that init() chooses for tensors of the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.cluster import ONE_THREAD, PYTHONPATH

pytestmark = pytest.mark.process  # each test imports TensorFlow in a process of its own

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
    # oneDNN, which is on by itself on some processors, has an allocator of its own.
    env["TF_ENABLE_ONEDNN_OPTS"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**env, **ONE_THREAD, "PYTHONPATH": PYTHONPATH, **chosen},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.nightly
def test_freed_memory_is_reused():
    assert int(said()) >= 256 * 1024 * 4


@pytest.mark.nightly
def test_users_allocator_setting_is_kept():
    assert said(TF_CPU_ALLOCATOR_USE_BFC="0") == "malloc keeps no account"
