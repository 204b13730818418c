"""The supervisor's process: the state machine of `supervisor.py` on real tasks, sockets and locks.

    with Signals() as stop:
        status = run_on_hosts(job, settings, host, lease, token, stop)

One loop in the main thread polls the tasks and passes events on. The lock has a thread, as a file
system or a store may not respond; connections have one, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import time
from collections.abc import Iterator
from typing import Any

from tfmw.cluster.cluster import TOKEN
from tfmw.cluster.signals import Signals
from tfmw.launcher.attempts import make_context
from tfmw.launcher.hosts.host_links import HostLinks, why_not_connected
from tfmw.launcher.hosts.lease import Lease, LeaseKeeper
from tfmw.launcher.hosts.settings import HostSettings
from tfmw.launcher.hosts.supervisor import Supervisor
from tfmw.launcher.options import LocalRun
from tfmw.launcher.output import Display, say
from tfmw.launcher.remote.links import secret_of_tasks
from tfmw.launcher.remote.messages import Over
from tfmw.launcher.remote.tasks import TasksOfOneMachine
from tfmw.storage.fence import FENCE

NOTICE_EVERY = 50
"""Number of failed connections before a notice of them, and between two notices."""

IDLE_S = 0.02
"""Seconds between two polls while no tasks run."""


def run_on_hosts(
    job: LocalRun, settings: HostSettings, host: int, lease: Lease, token: bytes, stop: Signals
) -> int:
    """Supervises this host's tasks until the run is over.

    Args:
        job: command to run; its tasks are those of one host.
        host: index of this host.
        token: the secret of all supervisors.

    Returns:
        The exit status.

    Raises:
        ClusterError: the port of this host is taken.
    """
    job = dataclasses.replace(
        job, env={**job.env, FENCE: lease.fence, TOKEN: secret_of_tasks(token)}
    )
    events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        links = stack.enter_context(HostLinks(settings.hosts, host, token, events.put))
        # The supervisor gets the signals, not the attempt.
        context = make_context(job, {**os.environ, **job.env}, Signals(), stack)
        keeper = stack.enter_context(LeaseKeeper(lease, events))
        tasks = stack.enter_context(contextlib.closing(TasksOfOneMachine(context)))
        supervisor = Supervisor(
            settings,
            host,
            time.monotonic(),
            links,
            keeper,
            tasks,
            notify=lambda text: context.display.line(f"tfmw: {text}"),
        )
        way = supervise(supervisor, context.display, events, stop)
    for line in way.lines:
        say(line)
    return way.status


def supervise(
    supervisor: Supervisor,
    display: Display,
    events: queue.SimpleQueue[tuple[Any, ...]],
    stop: Signals,
) -> Over:
    """Passes events on, until the supervisor has ended; returns its end."""
    for name, *arguments in _news(supervisor, display, events, stop):
        if name == "notify":
            supervisor.notify(*arguments)
        elif name == "not_connected":
            host, failures, problems = arguments
            if failures % NOTICE_EVERY == 0:
                why = why_not_connected(list(problems.values()))
                supervisor.notify(f"{supervisor.settings.name(host)} cannot be reached: {why}")
        else:
            getattr(supervisor, name)(*arguments, time.monotonic())
        if (way := supervisor.way_out) is not None:
            return way
    raise AssertionError("unreachable")


def _news(
    supervisor: Supervisor,
    display: Display,
    events: queue.SimpleQueue[tuple[Any, ...]],
    stop: Signals,
) -> Iterator[tuple[Any, ...]]:
    """Yields events; waits for output of its tasks, or for other hosts if no task runs."""
    signals = 0  # number of signals received, and passed on
    look_s = min(supervisor.settings.options.monitor_interval_s, IDLE_S)
    while True:
        wait_s = look_s if supervisor.tasks.idle else 0.0
        if (message := supervisor.tasks.look(look_s)) is not None:
            yield "from_tasks", message
        with contextlib.suppress(queue.Empty):
            while True:
                event = events.get(timeout=wait_s)
                wait_s = 0.0
                yield event
        if supervisor.keeper.is_expired():
            yield "lease_lost", "the lock could not be renewed in time"
        for number in stop.received[signals:]:
            signals += 1
            yield "signalled", number
        if display.broken:
            yield "signalled", signal.SIGPIPE
        yield ("tick",)
