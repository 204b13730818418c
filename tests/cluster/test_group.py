"""Values between workers during training: what is kept of them in the coordination service."""

from __future__ import annotations

import pytest


@pytest.mark.multiprocess
def test_keys_of_earlier_calls_are_deleted(run_cluster):
    """However many calls a training makes, a few dozen keys are kept on the chief."""
    results = run_cluster("group_keys.py", workers=2)
    assert [r["right"] for r in results] == [True, True]
    deleted = [f"{key}/" for key in results[0]["deleted"]]
    keys = [key for r in results for key in r["keys"]]
    assert len(keys) > 1500
    assert len(set(keys)) == len(keys)
    assert sum(not key.startswith(tuple(deleted)) for key in keys) < 150
    assert [r["first is there"] for r in results] == [False, False]
