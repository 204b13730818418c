"""The lock that decides who leads, and the record beside it: in a directory, and in a bucket."""

from __future__ import annotations

import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.buckets import s3
from tfmw.errors import UsageError
from tfmw.launcher.hosts.lease import Lease, LeaseKeeper, Record, lease_of
from tfmw.storage import directories, fence
from tfmw.storage.bucket import Bucket
from tfmw.storage.leased_object import TTL_S, DirectoryObjects, Lost

Make = Callable[[int], Lease]


@pytest.fixture(params=["directory", "bucket"])
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Makes the lease of a host; all of them are of one run."""
    if request.param != "bucket":
        yield lambda host: lease_of(f"dir:{tmp_path}/run", host)
        return
    with s3(monkeypatch) as server:
        yield lambda host: lease_of(f"{server.url}/run7", host)


def test_one_holder_at_a_time_and_its_record(make):
    one, other = make(0), make(1)
    assert one.record() is None
    assert one.acquire()
    assert one.acquire()
    assert not other.acquire()
    record = Record("run", attempt=3, hosts=(0, 2), lines=("a",), policy={"restarts": 2})
    one.publish(record)
    one.renew()
    assert other.record() == record
    with pytest.raises(Lost):
        other.publish(record)
    one.release()
    assert other.acquire()
    assert other.record() == record
    with pytest.raises(Lost):
        one.publish(record)
    other.release()


def test_hosts_share_a_secret(make):
    assert make(0).secret() == make(1).secret() != b""


def test_only_the_last_attempt_puts_anything_in_its_place(make, tmp_path, monkeypatch):
    lease = make(0)
    assert lease.acquire()
    lease.publish(Record("run", attempt=4))
    monkeypatch.setenv(fence.FENCE, lease.fence)
    for attempt, writes in ((4, True), (3, False), (5, True)):
        monkeypatch.setenv(fence.ATTEMPT, str(attempt))
        target = tmp_path / f"target {attempt}"
        if writes:
            _write(target)
        else:
            with pytest.raises(fence.Fenced, match="attempt 3, and other hosts have begun"):
                _write(target)
        assert target.exists() == writes
    assert not list(tmp_path.glob(".*writing*"))
    lease.release()


def _write(target: Path) -> None:
    with directories.atomic_directory(str(target)) as temporary:
        Path(temporary).mkdir()


def test_a_record_that_cannot_be_read_lets_nobody_write(tmp_path, monkeypatch):
    monkeypatch.setenv(fence.FENCE, str(tmp_path / "gone"))
    with pytest.raises(OSError, match="gone"):
        fence.check()


def test_a_directorys_files_are_for_their_owner_only(tmp_path):
    lease = lease_of(f"dir:{tmp_path}", 0)
    lease.secret()
    assert lease.acquire()
    for name in ("key", "LEADER"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    lease.release()


def test_a_record_whose_writing_stalled_is_still_the_holders(tmp_path, monkeypatch):
    """A stalled write blocks other hosts, which then have to wait for the time of a lease."""
    clock, other_clock = [0.0], [100.0]
    objects = DirectoryObjects(str(tmp_path))
    lease = Lease(objects, 0, clock=lambda: clock[0])
    other = Lease(objects, 1, clock=lambda: other_clock[0])
    assert lease.acquire()
    assert not other.acquire()
    synced = os.fsync
    refused: list[bool] = []

    def stalls(descriptor: int) -> None:
        synced(descriptor)
        if not refused:
            clock[0], other_clock[0] = TTL_S, 100.0 + TTL_S
            refused.append(True)
            with pytest.raises(BlockingIOError):
                other.acquire()

    monkeypatch.setattr(os, "fsync", stalls)
    lease.publish(Record("run", attempt=1))
    assert refused
    assert not other.acquire()
    assert other.record() == Record("run", attempt=1)
    with pytest.raises(Lost, match="not renewed in time"):
        lease.publish(Record("run", attempt=2))
    other_clock[0] += TTL_S
    assert other.acquire()
    clock[0] += TTL_S
    with pytest.raises(Lost, match="another process has taken over"):
        lease.renew()


class Stalling:
    """A lock that is held, and whose record cannot be read, or not in time."""

    def __init__(self, stalls: threading.Event | None) -> None:
        self.held_until = 0.0
        self.released = threading.Event()
        self.asked = threading.Event()
        self.poll_s = 0.0
        self._stalls = stalls

    def acquire(self) -> bool:
        self.held_until = 1e12 if self._stalls is None else 1.0  # monotonic: long ago
        return True

    def renew(self) -> None:
        pass

    def record(self) -> None:
        self.asked.set()
        if self._stalls is None:
            raise OSError("stale file handle")
        assert self._stalls.wait(20)

    def release(self) -> None:
        self.released.set()


@pytest.mark.parametrize("stalls", [True, False])
def test_a_lock_with_which_nobody_leads_is_given_back(stalls):
    goes_on = threading.Event()
    lease: Any = Stalling(goes_on if stalls else None)
    events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    with LeaseKeeper(lease, events) as keeper:
        keeper.campaigning = True
        assert lease.asked.wait(20)
        goes_on.set()
        assert lease.released.wait(20)
        while not events.empty():
            assert events.get()[0] != "lease_gained"


def test_a_holder_in_a_bucket_stops_before_another_can_lead(monkeypatch):
    clocks = [[0.0], [100.0]]
    with s3(monkeypatch) as server:
        bucket = Bucket(f"{server.url}/run7", quick=True)
        one = Lease(bucket, 0, clock=lambda: clocks[0][0])
        other = Lease(bucket, 1, clock=lambda: clocks[1][0])
        assert one.acquire()
        assert one.held_until == 8.0
        one.publish(Record("run", attempt=1))
        assert not other.acquire()
        clocks[0][0] = 7.0
        server.fault = lambda number, method, key: 403
        with pytest.raises(OSError, match="access is denied"):
            one.renew()
        assert one.held_until == 8.0
        server.fault = lambda number, method, key: None
        clocks[0][0] = 8.0
        with pytest.raises(Lost, match="not renewed in time"):
            one.publish(Record("run", attempt=2))
        clocks[1][0] += TTL_S
        assert other.acquire()
        clocks[0][0] = 0.0  # a clock that stops does not help either
        with pytest.raises(Lost):
            one.publish(Record("run", attempt=2))
        assert other.record() == Record("run", attempt=1)


def test_a_place_that_is_no_lock_is_refused():
    with pytest.raises(UsageError, match=r"expected dir:/path of a directory .*, or s3://bucket"):
        lease_of("etcd://h0:2379", 0)


def test_a_record_in_a_bucket_that_cannot_be_read_lets_nobody_write(monkeypatch):
    with s3(monkeypatch) as server:
        monkeypatch.setenv(fence.FENCE, f"{server.url}/run7/LEADER")
        with pytest.raises(OSError, match="s3://bucket/run7/LEADER has no record"):
            fence.check()
        server.fault = lambda number, method, key: 403
        with pytest.raises(OSError, match="access is denied"):
            fence.check()
