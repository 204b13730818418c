"""Many real workers on this machine: `bench.growth`, as it fills its table."""

from __future__ import annotations

import pytest

from bench import growth


@pytest.mark.nightly
@pytest.mark.process
def test_48_workers_train_and_resume_when_one_is_killed() -> None:
    found = growth.run(48, 0.0, kill=True)
    assert 0 < found["first_step"] < found["whole"]
    assert 0 < found["restart"] < found["whole"] - found["first_step"]
