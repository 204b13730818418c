"""The supervisor's process: the state machine of `supervisor.py` on real tasks, sockets and locks.

    with Signals() as stop:
        status = run_on_hosts(job, settings, host, lease, token, stop)

One loop in the main thread: it looks at the tasks, hands events over, and does what the state
machine asks for. The lock has a thread, as a file system or etcd may not respond; connections have
one, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tfmw.cluster import addresses
from tfmw.errors import ClusterError
from tfmw.hosts.actions import (
    HEARTBEAT_S,
    SILENCE_S,
    Action,
    Campaign,
    Dial,
    Drop,
    Exit,
    HostSettings,
    Notify,
    Prepare,
    Publish,
    Record,
    Resign,
    ToLeader,
    ToMember,
    ToTasks,
)
from tfmw.hosts.lease import Lease, Lost
from tfmw.hosts.supervisor import Supervisor
from tfmw.launcher.attempts import make_context
from tfmw.launcher.options import LocalRun
from tfmw.launcher.output import Display
from tfmw.remote.links import CLOSED, Links, Post, Timing
from tfmw.remote.messages import HostHello, Message
from tfmw.remote.tasks import TasksOfOneMachine
from tfmw.runtime import sockets
from tfmw.runtime.fence import FENCE
from tfmw.runtime.signals import Signals

TIMING = Timing(HEARTBEAT_S, SILENCE_S, hello_s=3.0)

POLL_S = 0.25
"""Seconds between two attempts to get the lock, or to renew it."""

NOTICE_EVERY = 50
"""Failures to connect until a notice of them, and between two."""

IDLE_S = 0.02
"""Seconds between two looks while no tasks run."""


def run_on_hosts(
    job: LocalRun, settings: HostSettings, host: int, lease: Lease, token: bytes, stop: Signals
) -> int:
    """Supervises this host's tasks until the run is over.

    Args:
        job: what to run; its tasks are those of one host.
        host: index of this host.
        token: the secret of all supervisors.

    Returns:
        The exit status.

    Raises:
        ClusterError: this host's port is taken.
    """
    secret = hmac.digest(token, b"tfmw tasks", "sha256").hex()
    job = dataclasses.replace(job, env={**job.env, FENCE: lease.fence, "TFMW_TOKEN": secret})
    events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        links = stack.enter_context(HostLinks(settings.hosts, host, token, events.put))
        # The supervisor gets the signals, not the attempt.
        context = make_context(job, {**os.environ, **job.env}, Signals(), stack)
        keeper = stack.enter_context(LeaseKeeper(lease, events))
        tasks = stack.enter_context(contextlib.closing(TasksOfOneMachine(context)))
        loop = _Loop(settings, host, links, keeper, tasks, context.display)
        way = loop.run(events, stop)
    for line in way.lines:
        print(line, file=sys.stderr)
    return way.status


class HostLinks(Links):
    """All connections of one supervisor.

    Args:
        hosts: addresses of all supervisors.
        host: index of this one.
        post: see `tfmw.remote.links.Links`; hosts have their indexes for names.

    Raises:
        ClusterError: this host's port is taken.
    """

    def __init__(self, hosts: Sequence[str], host: int, token: bytes, post: Post) -> None:
        self._hosts = tuple(hosts)
        self._host = host
        super().__init__(token, post, TIMING, _listening(hosts[host]), self._host_of)

    def _host_of(self, greeting: Message) -> int:
        if (
            not isinstance(greeting, HostHello)
            or (greeting.to, greeting.hosts) != (self._host, self._hosts)
            or greeting.host not in range(len(self._hosts))
        ):
            raise ValueError("a host of another run")
        return greeting.host

    def dial_host(self, host: int | None) -> None:
        """Is connected to this host from now on, again and again; None: to none."""
        if host is None:
            self.dial(None)
            return
        own = addresses.split(self._hosts[self._host])[0]
        self.dial(
            host,
            [addresses.split(self._hosts[host])],
            lambda _: HostHello(self._host, host, self._hosts),
            # From loopback address to loopback address, so that each host keeps its own.
            local=(own, 0) if own.startswith("127.") else None,
        )


def why_not_connected(problems: Sequence[str]) -> str:
    """Why a host cannot be reached, and what to look at."""
    return ", ".join(problems).replace(
        CLOSED, "it closes the connection: is its token (TFMW_TOKEN) the same, and its --hosts?"
    )


def _listening(address: str) -> socket.socket:
    host, port = addresses.split(address)
    try:
        return sockets.listen(host, port)
    except OSError as error:
        raise ClusterError(
            f"port {port} of this host's address {address!r} cannot be used ({error.strerror}): "
            "stop the process that holds it, or give this host another port in every --hosts."
        ) from None


class LeaseKeeper:
    """Gets and renews the lock, in a thread; `events` get what happens."""

    def __init__(self, lease: Lease, events: queue.SimpleQueue[tuple[Any, ...]]) -> None:
        self.lease = lease
        self.campaigning = False
        self._events = events
        self._mutex = threading.Lock()
        self._leads = False  # as far as the supervisor knows
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="tfmw-lock", daemon=True)

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        # A lock that does not respond ends with this process.
        if self._mutex.acquire(timeout=2.0):
            self.lease.release()
            self._mutex.release()

    def _keep(self) -> None:
        problem = ""
        while not self._closed.wait(POLL_S):
            try:
                with self._mutex:
                    if not self._closed.is_set():
                        self._look()
                problem = ""
            except Lost as error:
                self._leads = False
                self._events.put(("lease_lost", str(error)))
            except OSError as error:
                if str(error) != problem:
                    self._events.put(("notify", f"the lock cannot be asked for: {error}"))
                problem = str(error)

    def _look(self) -> None:
        if self._leads:
            self.lease.renew()
            return
        if self.lease.held_until:  # the lock, or its record, did not respond in time: others lead
            self.lease.release()
        if not (self.campaigning and self.lease.acquire()):
            self._events.put(("record_seen", self.lease.record()))
            return
        record = self.lease.record()
        if time.monotonic() < self.lease.held_until:
            self._leads = True
            self._events.put(("lease_gained", record))

    def resign(self) -> None:
        """Gives the lock back."""
        with self._mutex:
            self._leads = False
            self.lease.release()

    def publish(self, record: Record) -> None:
        """Writes the record. Raises Lost or OSError."""
        with self._mutex:
            self.lease.publish(record)

    def is_expired(self) -> bool:
        """Whether the lock was held and could not be renewed in time."""
        if self._leads and time.monotonic() >= self.lease.held_until:
            self._leads = False
            return True
        return False


@dataclasses.dataclass
class _Loop:
    """The main thread's loop."""

    settings: HostSettings
    host: int
    links: HostLinks
    keeper: LeaseKeeper
    tasks: TasksOfOneMachine
    display: Display
    signals: int = 0  # received, and handed over

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.settings, self.host, time.monotonic())

    def run(self, events: queue.SimpleQueue[tuple[Any, ...]], stop: Signals) -> Exit:
        """Returns how this supervisor ends."""
        while True:
            for event in self._news(events, stop):
                self._hand_over(event)
                if (way := self._act()) is not None:
                    return way

    def _news(
        self, events: queue.SimpleQueue[tuple[Any, ...]], stop: Signals
    ) -> Iterator[tuple[Any, ...]]:
        """Yields what has happened. Waits for its tasks, or for other hosts where none runs."""
        wait_s = min(self.settings.options.monitor_interval_s, IDLE_S)
        is_idle = self.tasks.idle
        if (message := self.tasks.look(wait_s)) is not None:
            yield "from_tasks", message
        wait_s = wait_s if is_idle else 0.0
        with contextlib.suppress(queue.Empty):
            while True:
                event = events.get(timeout=wait_s)
                wait_s = 0.0
                yield event
        if self.keeper.is_expired():
            yield "lease_lost", "the lock could not be renewed in time"
        for number in stop.received[self.signals :]:
            self.signals += 1
            yield "signalled", number
        if self.display.broken:
            yield "signalled", signal.SIGPIPE
        yield ("tick",)

    def _hand_over(self, event: tuple[Any, ...]) -> None:
        name, *arguments = event
        if name == "notify":
            self._notify(*arguments)
        elif name == "not_connected":
            host, failures, problems = arguments
            if failures % NOTICE_EVERY == 0:
                why = why_not_connected(list(problems.values()))
                self._notify(f"{self.settings.name(host)} cannot be reached: {why}")
        else:
            getattr(self.supervisor, name)(*arguments, time.monotonic())

    def _act(self) -> Exit | None:
        """Does what the supervisor asks for; returns how it ends, if it does."""
        while actions := self.supervisor.take(time.monotonic()):
            for action in actions:
                if isinstance(action, Exit):
                    return action
                try:
                    self._do(action)
                except (Lost, OSError) as error:
                    if not isinstance(action, Publish):
                        raise
                    self.keeper.resign()
                    self._hand_over(("lease_lost", str(error)))
        return None

    def _do(self, action: Action) -> None:
        match action:
            case ToMember(host, message):
                self.links.to_member(host, message)
            case ToLeader(message):
                self.links.to_leader(message)
            case Drop(host):
                self.links.drop(host)
            case Dial(host):
                self.links.dial_host(host)
            case Campaign(on):
                self.keeper.campaigning = on
            case Resign():
                self.keeper.resign()
            case Publish(record):
                self.keeper.publish(record)
            case Prepare():
                self.tasks.prepare(self.settings.ports_per_host)
            case ToTasks(message):
                ended = self.tasks.do(message)
                if ended is not None:
                    self._hand_over(("from_tasks", ended))
            case Notify(text):
                self._notify(text)

    def _notify(self, text: str) -> None:
        self.display.line(f"tfmw: {text}")
