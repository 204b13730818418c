"""Restarts of a parameter-server run by the launcher, and leaving when told to."""

from __future__ import annotations

import json
import re

import pytest

from tests.helpers.cluster import PROGRAMS, run_command

pytestmark = pytest.mark.process

EPOCHS, STEPS = 5, 60


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
@pytest.mark.nightly
def test_progress_over_restarts_and_prompt_preemption(tmp_path, mode):
    program = [str(PROGRAMS / "ps_restart.py"), f"--backup={tmp_path / 'backup'}"]
    program += ["--sync"] * (mode == "synchronous")
    options = ["--workers", "2", "--ps", "1", "--max-restarts", "2", "--isolate", "off"]
    # Shorter than the workers wait for a batch: the chief, which waits for them, does not hang.
    options += ["--hang-timeout", "6"]
    status, output = run_command("tfmw", "run", *options, *program)
    assert status == 0, output
    lines = [line for line in output.splitlines() if line.startswith("tfmw: ")]
    # Steps count from the start of the training: the second attempt got further than the first.
    assert "restart 1 of 2 at once" in lines[0]
    assert "at step 120: ValueError" in lines[0]
    assert "restart 2 of 2 at once" in lines[1]
    assert "at step 180: ValueError" in lines[1]
    # Told to leave after the first steps of epoch 3, it does not wait for the last ones.
    told = [int(n) for n in re.findall(r"epoch 3: batch (\d+), told", output)]
    assert told
    if mode == "synchronous":  # the others are scheduled at once, as they are so few
        assert told[-1] < STEPS
    assert "epoch 4: batch" not in output
    left = [re.search(r"at step (\d+) \(not counted", line) for line in lines[2:4]]
    assert left[1]
    # Told to leave in the validation of the last epoch, it makes no step again.
    assert int(left[1][1]) == EPOCHS * STEPS
    assert output.count(f"epoch 4 ends at {4 * STEPS}") == 1
    assert output.count(f"epoch 5 ends at {5 * STEPS}") == 1
    result = re.search(r"result (\{.*\})", output)
    assert result
    found = json.loads(result[1])
    assert found["iterations"] == EPOCHS * STEPS
    assert found["history"]["loss"] == found["history"]["val_loss"] == EPOCHS
    assert found["evaluated"] > 0.8
