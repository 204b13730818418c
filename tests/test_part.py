"""A part of the tests: about as large as asked for, the same for a seed, another for others."""

from __future__ import annotations

from tests.helpers.part import chosen

TESTS = [f"tests/some/test_file.py::test_case[{number}]" for number in range(1000)]


def test_a_part_of_the_tests() -> None:
    one, again, other = (chosen(TESTS, 2, seed) for seed in ("1a2b3c4", "1a2b3c4", "5d6e7f8"))
    assert one == again != other
    assert 400 < len(one) < 600
    assert 200 < len(chosen(TESTS, 4, "1a2b3c4")) < 300
