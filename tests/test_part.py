"""Selection and order of the tests."""

from __future__ import annotations

from tests.conftest import LONG
from tests.helpers.cluster import ROOT
from tests.helpers.part import chosen

TESTS = [f"tests/some/test_file.py::test_case[{number}]" for number in range(1000)]


def test_a_part_is_as_large_as_asked_for_and_another_for_each_seed() -> None:
    one, again, other = (chosen(TESTS, 2, seed) for seed in ("1a2b3c4", "1a2b3c4", "5d6e7f8"))
    assert one == again != other
    assert 400 < len(one) < 600
    assert 200 < len(chosen(TESTS, 4, "1a2b3c4")) < 300


def test_files_that_begin_first_exist() -> None:
    assert [name for name in LONG if not (ROOT / "tests" / name).exists()] == []
