"""The lock whose holder leads: an object in a shared directory or in a bucket, with the record.

    lease = lease_of("dir:/shared/run7/supervisors", host=1)
    lease.acquire()                  # whether this process holds the lock now
    lease.held_until                 # monotonic seconds until which it is certain; 0: not held
    lease.renew()                    # extends that; raises Lost
    lease.record()                   # the last holder's published record, or None
    lease.publish(record)            # durably; if it raises Lost, the record is unchanged
    lease.release()                  # releases it, if it is held
    lease.secret()                   # shared by hosts that reach the lock; the first call draws it
    lease.fence                      # the record's place for tasks; see `tfmw.storage.fence`

Each call may wait for a network, and raises OSError if its answer cannot be known now. See
docs/explain/leader-election.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import secrets
import threading
import time
from typing import Any

from tfmw.errors import UsageError
from tfmw.launcher.remote.messages import built
from tfmw.storage.bucket import Bucket, is_bucket
from tfmw.storage.disk import file_lock
from tfmw.storage.leased_object import BEAT_S, Clock, DirectoryObjects, LeasedObject, Lost

DIRECTORY = "dir:"
_NAME, _KEY = "LEADER", "key"


@dataclasses.dataclass(frozen=True)
class Record:
    """The leader's notes, stored with the lock."""

    run: str  # id of the run
    attempt: int = -1  # number of the last attempt, which only grows, also from one run to the next
    leader: int = 0  # index of the leading host
    hosts: tuple[int, ...] = ()  # indexes of the hosts of the last attempt
    running: bool = False  # whether that attempt has not ended, as far as its leader knew
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)  # see `RestartPolicy.saved`
    status: int | None = None  # exit status of the run; None: it has not ended
    lines: tuple[str, ...] = ()  # lines about the end, for the user


def lease_of(rendezvous: str, host: int) -> Lease:
    """The lease at "dir:/shared/path" or in a bucket, at "s3://bucket/run7".

    Args:
        rendezvous: argument of the user.

    Raises:
        UsageError: neither of them, a directory that cannot be written to, or a bucket that
            cannot be opened.
    """
    if is_bucket(rendezvous):
        # each poll is one or two requests, for which the store charges
        return Lease(Bucket(rendezvous, quick=True), host, poll_s=1.0)
    if not rendezvous.startswith(DIRECTORY) or rendezvous == DIRECTORY:
        raise UsageError(
            f"--rendezvous is {rendezvous!r}; expected dir:/path of a directory that all hosts "
            "share, or s3://bucket/run7, gs://bucket/run7 or az://container/run7."
        )
    directory = os.path.abspath(rendezvous.removeprefix(DIRECTORY))
    try:
        os.makedirs(directory, exist_ok=True)
        with contextlib.suppress(BlockingIOError), file_lock(f"{directory}/{_NAME}.lock"):
            pass  # it can be locked
    except OSError as error:
        raise UsageError(
            f"hosts cannot agree on a leader in {directory!r} ({error}): name a directory that all "
            "of them share and may write to, with --rendezvous dir:/path."
        ) from error
    return Lease(DirectoryObjects(directory), host)


class Lease(LeasedObject):
    """The lock: an object that its holder renews, with the record in it.

    Args:
        objects: where the object is.
        host: index of this host.
        poll_s: seconds between two attempts to get the lock.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        objects: Bucket | DirectoryObjects,
        host: int,
        poll_s: float = 0.25,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(objects, _NAME, f"host {host}", clock)
        self.poll_s = poll_s
        self.fence = f"{objects.url}/{_NAME}"

    def renew(self) -> None:
        if self._clock() - self.since >= BEAT_S:
            super().renew()

    def record(self) -> Record | None:
        content = self.look()
        try:
            return None if content is None else built(Record, content)
        except ValueError as error:
            raise OSError(f"the record of the run is damaged ({error})") from error

    def publish(self, record: Record) -> None:
        if self._clock() >= self.held_until:
            raise Lost("the lock was not renewed in time")
        self.write(dataclasses.asdict(record))

    def secret(self) -> bytes:
        self._bucket.replace(_KEY, secrets.token_hex(32).encode(), None)
        found = self._bucket.read(_KEY)
        if found is None:
            raise OSError(f"{self._bucket.url}/{_KEY} was removed")
        return found[0]


class LeaseKeeper:
    """Acquires and renews the lock, in a thread; its events go to `events`."""

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
        while not self._closed.wait(self.lease.poll_s):
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
        # the lock, or its record, did not respond in time: others may lead
        if self.lease.held_until:
            self.lease.release()
        if not (self.campaigning and self.lease.acquire()):
            self._events.put(("record_seen", self.lease.record()))
            return
        record = self.lease.record()
        if time.monotonic() < self.lease.held_until:
            self._leads = True
            self._events.put(("lease_gained", record))

    def resign(self) -> None:
        """Releases the lock."""
        with self._mutex:
            self._leads = False
            self.lease.release()

    def publish(self, record: Record) -> None:
        """Writes the record durably. Raises Lost."""
        try:
            with self._mutex:
                self.lease.publish(record)
        except OSError as error:
            raise Lost(str(error)) from error

    def is_expired(self) -> bool:
        """Whether the lock was held and could not be renewed in time."""
        if self._leads and time.monotonic() >= self.lease.held_until:
            self._leads = False
            return True
        return False
