"""The supervisor's loop waits for each sender of news, and never spins."""

from __future__ import annotations

import queue
import signal
import types
from typing import Any

import pytest

from tfmw.errors import PREEMPTED
from tfmw.launcher.hosts.settings import HostSettings
from tfmw.launcher.hosts.supervisor import Supervisor
from tfmw.launcher.hosts.supervisor_loop import IDLE_S, supervise
from tfmw.launcher.options import RunOptions

ROUNDS = 3


class Inbox:
    """Nothing happens; after some rounds this host is preempted."""

    def __init__(self, signals: types.SimpleNamespace) -> None:
        self.waited: list[float] = []
        self._signals = signals

    def get(self, timeout: float) -> tuple[Any, ...]:
        self.waited.append(timeout)
        if len(self.waited) == ROUNDS:
            self._signals.received.append(signal.SIGTERM)
        raise queue.Empty


class Tasks:
    def __init__(self, idle: bool) -> None:
        self.idle = idle
        self.waited: list[float] = []

    def look(self, wait_s: float) -> None:
        self.waited.append(wait_s)

    def prepare(self, count: int) -> None:
        pass


@pytest.mark.parametrize("idle", [True, False])
def test_it_waits_for_its_tasks_or_for_other_hosts(idle):
    settings = HostSettings(
        hosts=("10.0.0.1:1", "10.0.0.2:1"),
        min_hosts=2,
        workers_per_host=1,
        rejoin_timeout_s=30.0,
        options=RunOptions(),
    )
    signals: Any = types.SimpleNamespace(received=[])
    inbox: Any = Inbox(signals)
    tasks: Any = Tasks(idle)
    links: Any = None
    keeper: Any = types.SimpleNamespace(campaigning=False, is_expired=lambda: False)
    display: Any = types.SimpleNamespace(broken=False)
    supervisor = Supervisor(settings, 0, 0.0, links, keeper, tasks, print)
    assert supervise(supervisor, display, inbox, signals).status == PREEMPTED
    assert inbox.waited == [IDLE_S if idle else 0.0] * ROUNDS
    assert tasks.waited == [IDLE_S] * ROUNDS  # at once where they are idle
