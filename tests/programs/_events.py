"""Events of a server of `tests.helpers.events`, whose address is the first argument."""

import sys
import urllib.request
from urllib.parse import quote

ADDRESS = sys.argv[1]


def add(event: str) -> None:
    """Counts an event."""
    urllib.request.urlopen(f"{ADDRESS}/add/{quote(event)}").read()


def wait_for(event: str, count: int = 1) -> None:
    """Waits until an event has come so often; raises an error after two minutes."""
    urllib.request.urlopen(f"{ADDRESS}/wait/{quote(event)}/{count}").read()


def wait_briefly_for(event: str, count: int = 1) -> None:
    """Waits a second for what must not happen."""
    urllib.request.urlopen(f"{ADDRESS}/wait_briefly/{quote(event)}/{count}").read()


def meet(event: str) -> None:
    """Waits until both tasks are here."""
    add(event)
    wait_for(event, 2)
