"""Parametrized cases of `make test` and `make nightly`, in shared launches.

@pytest.mark.parametrize("name", cases(SOME, MORE))
def test_it(run, name): ...

@pytest.fixture(scope="module")
def run(request): return run_cluster("program.py", *chosen(request, "test_it"))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def cases(some: Sequence[Any], more: Sequence[Any] = ()) -> list[Any]:
    """Parameters of a test for `make test` and `make nightly`."""
    return [
        *some,
        *(pytest.param(each, marks=pytest.mark.nightly) for each in more),
    ]


def every(step: int, all_cases: Iterable[Any]) -> list[Any]:
    """Parameters; each `step`-th is for `make test`, the others are for `make nightly`."""
    listed = list(all_cases)
    return cases(listed[::step], [each for i, each in enumerate(listed) if i % step])


def chosen(request: pytest.FixtureRequest, test: str, parameter: str = "name") -> list[Any]:
    """The parameters of the cases of a test of this file that run, in order."""
    items: list[Any] = request.session.items
    found = [i for i in items if i.path == request.path and i.name.startswith(f"{test}[")]
    return [item.callspec.params[parameter] for item in found]


def each(found: Iterable[T]) -> list[T]:
    """A list for a loop of assertions, which fails if it is empty."""
    listed = list(found)
    assert listed, "there is nothing to compare"
    return listed
