"""`make flaky` on a test that fails under one of its conditions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import flaky
from tests.helpers.part import ORDER, number


@pytest.mark.parametrize(("condition", "failed"), [("one core", 0), ("drawn order", 1)])
def test_a_test_that_fails_under_one_condition_is_found(
    tmp_path: Path, condition: str, failed: int
) -> None:
    assert condition in flaky.CONDITIONS
    test = f"import os\ndef test_it(): assert {ORDER!r} not in os.environ\ndef test_2(): pass\n"
    (tmp_path / "test_it.py").write_text(test)
    found = flaky.failed_in(condition, 7, ["-q", str(tmp_path)])
    assert [Path(test).name for test in found] == ["test_it.py::test_it"] * failed


def test_each_seed_draws_another_order() -> None:
    files = [f"test_{i}.py" for i in range(20)]
    orders = {tuple(sorted((number(file, seed), file) for file in files)) for seed in "123"}
    assert len({tuple(file for _, file in order) for order in orders}) == 3
