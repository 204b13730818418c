"""The lock whose holder leads: `flock` on a file, or conditional writes of an object in a bucket.

    lease = lease_of("dir:/shared/run7/supervisors", host=1)
    lease.acquire()                  # whether this process holds the lock now
    lease.held_until                 # monotonic seconds until which it is certain; 0: not held
    lease.renew()                    # extends that; raises Lost
    lease.record()                   # the last holder's published record, or None
    lease.publish(record)            # durably; if it raises Lost, the record is unchanged
    lease.release()                  # releases it, if it is held
    lease.secret()                   # shared by hosts that reach the lock; the first call draws it
    lease.fence                      # the record's place for tasks; see `tfmw.storage.fence`

Each call may wait for a network, and raises OSError if its answer cannot be known now. The two
kinds treat a leader that is cut off differently: see docs/explain/leader-election.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfmw.errors import UsageError
from tfmw.launcher.remote.messages import built
from tfmw.storage.bucket import Bucket, is_bucket
from tfmw.storage.disk import file_lock, flush, replacing
from tfmw.storage.leased_object import BEAT_S, TTL_S, LeasedObject, Lost

DIRECTORY = "dir:"
_KEY = "key"
Clock = Callable[[], float]


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
        return BucketLease(rendezvous, host)
    if rendezvous.startswith(DIRECTORY) and len(rendezvous) > len(DIRECTORY):
        return DirectoryLease(Path(rendezvous.removeprefix(DIRECTORY)))
    raise UsageError(
        f"--rendezvous is {rendezvous!r}; expected dir:/path of a directory that all hosts share, "
        "or s3://bucket/run7, gs://bucket/run7 or az://container/run7."
    )


def _record_of(content: Any) -> Record:
    try:
        record: Record = built(Record, content)
        return record
    except ValueError as error:
        raise OSError(f"the record of the run is damaged ({error})") from error


class DirectoryLease:
    """A lock in a directory that all hosts share: `flock` on a file.

    Args:
        directory: the directory; created if it does not exist.
        clock: monotonic seconds.

    Raises:
        UsageError: the directory cannot be written to.
    """

    poll_s = 0.25  # interval between two attempts to get the lock, or to renew it

    def __init__(self, directory: Path, clock: Clock = time.monotonic) -> None:
        self._lock = directory / "LEADER"
        self._record = directory / "record.json"
        self._key = directory / _KEY
        self._clock = clock
        self._held = contextlib.ExitStack()
        self._own: Record | None = None  # the last record that this process has published
        self.held_until = 0.0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(f"{directory} is not writable")
        except OSError as error:
            raise UsageError(
                f"hosts cannot agree on a leader in {str(directory)!r} ({error}): name a directory "
                "that all of them share and may write to, with --rendezvous dir:/path."
            ) from error

    @property
    def fence(self) -> str:
        return str(self._record.absolute())

    def acquire(self) -> bool:
        if self.held_until:
            return True
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(file_lock(str(self._lock)))
            except BlockingIOError:
                return False
            self._held = stack.pop_all()
        self._own = None
        self.held_until = self._clock() + TTL_S
        return True

    def renew(self) -> None:
        asked = self._clock()
        # A network file system may have given the lock away while its server was unreachable.
        if self._own is not None and self.record() != self._own:
            self.release()
            raise Lost("another host has written the record of the run")
        self._check_time()
        self.held_until = asked + TTL_S

    def _check_time(self) -> None:
        if self._clock() >= self.held_until:  # perhaps the file system has stalled
            self.release()
            raise Lost("the lock was not renewed in time")

    def record(self) -> Record | None:
        try:
            return _record_of(json.loads(self._record.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise OSError(f"the record of the run is damaged ({error})") from error

    def publish(self, record: Record) -> None:
        self.renew()
        with replacing(self._record) as temporary:
            Path(temporary).write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")
            flush(temporary)
            self._check_time()
        flush(self._record.parent)
        self._own = record

    def release(self) -> None:
        self.held_until = 0.0
        self._held.close()

    def secret(self) -> bytes:
        temporary = self._key.with_name(f".key.{secrets.token_hex(6)}")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_hex(32).encode())
        try:
            os.link(temporary, self._key)  # fails if another host was first
        except FileExistsError:
            pass
        finally:
            os.unlink(temporary)
        return self._key.read_bytes()


class BucketLease:
    """A lock in a bucket: an object that its holder renews, with the record in it.

    Args:
        url: "s3://bucket/run7".
        clock: monotonic seconds.

    Raises:
        UsageError: the bucket cannot be opened.
    """

    poll_s = 1.0  # each poll is one or two requests, for which the store charges

    def __init__(self, url: str, host: int, clock: Clock = time.monotonic) -> None:
        self._bucket = Bucket(url, quick=True)
        self._object = LeasedObject(self._bucket, "LEADER", f"host {host}", clock)
        self._clock = clock
        self._renewed = 0.0
        self.fence = f"{self._bucket.url}/LEADER"

    @property
    def held_until(self) -> float:
        return self._object.held_until

    def acquire(self) -> bool:
        return self._object.acquire()

    def renew(self) -> None:
        if self._clock() - self._renewed >= BEAT_S:
            self._renewed = self._clock()
            self._object.renew()

    def record(self) -> Record | None:
        content = self._object.look()
        return None if content is None else _record_of(content)

    def publish(self, record: Record) -> None:
        if self._clock() >= self.held_until:
            raise Lost("the lock in the bucket was not renewed in time")
        self._object.write(dataclasses.asdict(record))

    def release(self) -> None:
        self._object.release()

    def secret(self) -> bytes:
        self._bucket.create(_KEY, secrets.token_hex(32).encode())
        found = self._bucket.read(_KEY)
        if found is None:
            raise OSError(f"{self._bucket.url}/{_KEY} was removed")
        return found[0]


Lease = DirectoryLease | BucketLease


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
