"""Verdict of a run of Keras's tests, from the outcome of each test."""

from __future__ import annotations

from typing import Any

import pytest

from tests.keras_suite.__main__ import PACKAGES, Outcomes, Verdict, known_failures


def _outcomes(**tests: str) -> Outcomes:
    return {name: {"outcome": outcome} for name, outcome in tests.items()}


def _verdict(
    tfmw: Outcomes, keras: Outcomes, known: tuple[str, ...] = (), everything: bool = True
) -> Verdict:
    return Verdict.of(tfmw, keras, known, everything)


def test_passing_tests_hold() -> None:
    assert _verdict(_outcomes(a="passed", b="skipped"), {}).holds


def test_a_failure_with_tfmw_only_is_new() -> None:
    verdict = _verdict(_outcomes(a="failed", b="passed"), _outcomes(a="passed"))
    assert verdict.new == ["a"]
    assert not verdict.holds


def test_failure_with_plain_keras_too_is_ignored() -> None:
    verdict = _verdict(_outcomes(a="failed"), _outcomes(a="failed"))
    assert verdict.holds
    assert verdict.shared == ["a"]


def test_a_listed_failure_holds() -> None:
    verdict = _verdict(_outcomes(a="failed"), _outcomes(a="passed"), known=("a",))
    assert verdict.holds
    assert verdict.known == ["a"]


@pytest.mark.parametrize(
    ("tfmw", "keras"),
    [
        (_outcomes(a="passed"), {}),
        (_outcomes(a="failed"), _outcomes(a="failed")),
        (_outcomes(b="passed"), {}),
    ],
    ids=["passes", "fails with plain Keras", "is no test"],
)
def test_a_list_that_is_stale_does_not_hold(tfmw: Outcomes, keras: Outcomes) -> None:
    verdict = _verdict(tfmw, keras, known=("a",))
    assert list(verdict.stale) == ["a"]
    assert not verdict.holds


def test_sample_ignores_tests_outside_of_it() -> None:
    assert _verdict(_outcomes(b="passed"), {}, known=("a",), everything=False).holds


def test_the_list_is_well_formed() -> None:
    known: dict[str, Any] = known_failures()
    assert all(test.startswith(tuple(PACKAGES)) and "::" in test for test in known)
    assert all(reason.endswith(".") for reason in known.values())
