"""The lock whose holder leads; such locks exist already and are trusted.

    lease = lease_of("dir:/shared/run7/supervisors", host=1)
    lease.acquire()                  # whether this process holds the lock now
    lease.held_until                 # monotonic seconds until which it is certain; 0: not held
    lease.renew()                    # moves that; raises Lost
    lease.record()                   # what the last holder has published; None: nothing
    lease.publish(record)            # durably; raises Lost, and then it is not the record
    lease.release()                  # gives it back, where it is held
    lease.secret()                   # of all hosts that reach the lock; the first call draws it
    lease.fence                      # how tasks find the record; see `tfmw.storage.fence`

Each call may wait for a network, and raises OSError if its answer cannot be known now. What happens
to a leader that is cut off differs between the two kinds: see docs/explain/leader-election.md.
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

from tfmw.errors import TfmwError, UsageError
from tfmw.launcher.remote.messages import built
from tfmw.storage import etcd
from tfmw.storage.disk import file_lock, flush

TTL_S = 10
"""Seconds without a renewal after which a holder has lost the lock."""

_MARGIN_S = 2.0
"""By so much earlier a holder stops: for the time that its last messages take."""

POLL_S = 0.25
"""Seconds between two attempts to get the lock, or to renew it."""

DIRECTORY = "dir:"
Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Record:
    """The leader's notes beside the lock."""

    run: str  # identifies the run
    attempt: int = -1  # number of the last attempt; it only grows, from one run to the next too
    leader: int = 0  # index of the host that leads
    hosts: tuple[int, ...] = ()  # indexes of the hosts of the last attempt
    running: bool = False  # whether that attempt has not ended, as far as its leader knew
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)  # see `RestartPolicy.saved`
    status: int | None = None  # how the run ended; None: it has not
    lines: tuple[str, ...] = ()  # about that, for the user


class Lost(TfmwError):
    """This process does not hold the lock, or cannot know whether it does."""


def lease_of(rendezvous: str, host: int) -> Lease:
    """The lease at "dir:/shared/path" or "etcd://host:2379/key".

    Args:
        rendezvous: as the user wrote it.

    Raises:
        UsageError: neither of them, a directory that cannot be written to, or certificates that
            cannot be read.
    """
    if rendezvous.startswith(etcd.SCHEMES):
        try:
            return EtcdLease(rendezvous, host)
        except OSError as error:
            raise UsageError(
                f"the certificates for --rendezvous {rendezvous} cannot be read ({error}): set "
                "ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY to their files."
            ) from error
    if rendezvous.startswith(DIRECTORY) and len(rendezvous) > len(DIRECTORY):
        return DirectoryLease(Path(rendezvous.removeprefix(DIRECTORY)))
    raise UsageError(
        f"--rendezvous is {rendezvous!r}; expected dir:/path of a directory that all hosts share, "
        "or etcd://host:2379 (etcds:// over TLS)."
    )


def _text_of(record: Record) -> str:
    return json.dumps(dataclasses.asdict(record))


def _record_of(text: str) -> Record:
    try:
        record: Record = built(Record, json.loads(text))
        return record
    except ValueError as error:
        raise OSError(f"the record of the run is damaged ({error})") from error


class DirectoryLease:
    """A lock in a directory that all hosts share: `flock` on a file.

    Args:
        directory: made where it does not exist.
        clock: monotonic seconds.

    Raises:
        UsageError: it cannot be written to.
    """

    def __init__(self, directory: Path, clock: Clock = time.monotonic) -> None:
        self._lock = directory / "LEADER"
        self._record = directory / "record.json"
        self._key = directory / "key"
        self._clock = clock
        self._held = contextlib.ExitStack()
        self._own: Record | None = None  # what this process has published last
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
            return _record_of(self._record.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def publish(self, record: Record) -> None:
        self.renew()
        temporary = self._record.with_name(f".record.{os.getpid()}")
        temporary.write_text(_text_of(record), encoding="utf-8")
        flush(temporary)
        self._check_time()
        os.replace(temporary, self._record)
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
            os.link(temporary, self._key)  # fails where another host was first
        except FileExistsError:
            pass
        finally:
            os.unlink(temporary)
        return self._key.read_bytes()


class EtcdLease:
    """A lock in etcd: a key with a lease of TTL_S seconds. Its holder stops some time before.

    Args:
        url: "etcd://host:2379,host:2379/key".
        clock: monotonic seconds.
    """

    def __init__(self, url: str, host: int, clock: Clock = time.monotonic) -> None:
        self._client = etcd.Client(url)
        self._url = url.removesuffix("/")
        self._prefix = etcd.key_of(url)
        self._name = f"host {host} {secrets.token_hex(8)}"
        self._clock = clock
        self._lease = 0
        self._revision = 0
        self.held_until = 0.0

    @property
    def fence(self) -> str:
        return etcd.with_key(self._url, f"{self._prefix}/record")

    def acquire(self) -> bool:
        if self.held_until:
            return True
        if self._client.get(f"{self._prefix}/leader") is not None and not self._lease:
            return False
        asked = self._clock()
        self._lease = self._lease or self._client.grant(TTL_S)
        if not self._client.keep_alive(self._lease):
            self._lease = 0
            return False
        revision = self._client.create(f"{self._prefix}/leader", self._name, self._lease)
        if revision is None:
            # Perhaps by this process, in a request whose response was lost.
            found = self._client.look(f"{self._prefix}/leader")
            if found is None or found[0] != self._name:
                return False
            revision = found[1]
        self._revision = revision
        self.held_until = asked + TTL_S - _MARGIN_S
        return True

    def renew(self) -> None:
        asked = self._clock()
        if not self._client.keep_alive(self._lease):
            self._forget()
            raise Lost("the lease in etcd has ended")
        self.held_until = asked + TTL_S - _MARGIN_S

    def record(self) -> Record | None:
        text = self._client.get(f"{self._prefix}/record")
        return None if text is None else _record_of(text)

    def publish(self, record: Record) -> None:
        if self._clock() >= self.held_until:
            raise Lost("the lease in etcd was not renewed in time")
        if not self._client.put_if(
            f"{self._prefix}/record",
            _text_of(record),
            f"{self._prefix}/leader",
            self._revision,
        ):
            self._forget()
            raise Lost("another host has the lock in etcd")

    def release(self) -> None:
        lease = self._lease
        self._forget()
        if lease:
            with contextlib.suppress(OSError):  # it ends by itself
                self._client.revoke(lease)

    def _forget(self) -> None:
        self.held_until, self._lease = 0.0, 0

    def secret(self) -> bytes:
        drawn = secrets.token_hex(32)
        self._client.create(f"{self._prefix}/key", drawn)
        return (self._client.get(f"{self._prefix}/key") or "").encode()


Lease = DirectoryLease | EtcdLease


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
