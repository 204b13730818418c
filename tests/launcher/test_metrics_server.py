"""The address of `--metrics-port`."""

from __future__ import annotations

import pytest

from tfmw.errors import UsageError
from tfmw.observe.metrics_server import listens_at


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0", ("127.0.0.1", 0)),
        ("0.0.0.0:9400", ("0.0.0.0", 9400)),
        ("node7:9400", ("node7", 9400)),
        ("[::1]:9400", ("::1", 9400)),
    ],
)
def test_only_this_machine_unless_an_address_is_given(text: str, at: tuple[str, int]) -> None:
    assert listens_at(text) == at


@pytest.mark.parametrize("text", ["", "nine", ":9400", "node7:", "65536", "-1"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a port, such as 9400"):
        listens_at(text)
