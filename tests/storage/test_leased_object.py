"""A lock in a bucket or a directory: two writers, paused ones, lost requests, no common clock."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.helpers.buckets import NIGHTLY, opened
from tests.helpers.cluster import ROOT
from tfmw.storage.bucket import Bucket
from tfmw.storage.leased_object import TTL_S, DirectoryObjects, LeasedObject, Lost


@pytest.fixture(scope="module", params=["s3", "gs", *NIGHTLY])
def server(request):
    with pytest.MonkeyPatch.context() as patch, opened(request.param, patch) as found:
        yield found


class Clock:
    """A clock that a test moves, as a process's own."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["bucket", "directory"])
def make(server, request, tmp_path):
    server.fault = lambda number, method, key: None
    url = f"{server.url}/{request.node.name}"
    in_bucket = request.param == "bucket"
    bucket = Bucket(url, quick=True) if in_bucket else DirectoryObjects(str(tmp_path))

    def made(clock, owner=""):
        return LeasedObject(bucket, "lock", owner, clock)

    made.bucket = bucket  # type: ignore[attr-defined]
    return made


def test_who_waits_takes_over_after_a_time_of_its_own(make):
    """The clocks differ by an hour, and only their seconds count."""
    one, other = Clock(), Clock(3600.0)
    holder, waiting = make(one, "first"), make(other)
    assert holder.acquire()
    assert holder.held_until < TTL_S
    holder.write([1])
    assert not waiting.acquire()
    assert waiting.holder.startswith(f"process {os.getpid()} on ")
    assert waiting.holder.endswith(", first")
    other.now += TTL_S - 0.1
    assert not waiting.acquire()
    holder.renew()
    other.now += 1
    assert not waiting.acquire()
    other.now += TTL_S
    assert waiting.acquire()
    assert waiting.data == [1]


def test_a_holder_that_was_paused_writes_nothing_more(make):
    clocks = Clock(), Clock()
    paused, other = map(make, clocks)
    assert paused.acquire()
    paused.write("old")
    assert not other.acquire()
    clocks[1].now += TTL_S
    assert other.acquire()
    for _ in range(2):
        with pytest.raises(Lost, match=r"another process has taken over (\w+:/)?/"):
            paused.write("late")
        # Nor after it has read what the other one wrote; its own clock has stood still.
        assert paused.look() == "old"
    assert paused.held_until == 0
    paused.release()
    other.write("new")
    assert paused.look() == "new"
    assert not paused.acquire()
    other.release()
    assert paused.acquire()
    assert paused.data == "new"


@pytest.mark.parametrize("action", ["lost", "applied"])
def test_a_write_whose_fate_is_unknown_is_made_again(server, action):
    server.fault = lambda number, method, key: None
    bucket = Bucket(f"{server.url}/{action}", quick=True)
    holder = LeasedObject(bucket, "lock", clock=Clock())
    assert holder.acquire()
    server.fault = lambda number, method, key: action if method == "PUT" else None
    with pytest.raises(OSError, match="does not respond"):
        holder.write("first")
    server.fault = lambda number, method, key: None
    holder.write("second")
    assert LeasedObject(bucket, "lock").look() == "second"


def test_of_many_writers_at_once_one_gets_it(make):
    found = []
    start = threading.Barrier(8)

    def take() -> None:
        lock = make(Clock())
        start.wait()
        found.append(lock.acquire())

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False] * 7 + [True]


def test_of_a_process_of_this_machine_that_has_ended_it_is_free_at_once(make):
    program = (
        "from tfmw.storage.leased_object import Bucket, DirectoryObjects, LeasedObject\n"
        f"objects = {type(make.bucket).__name__}({make.bucket.url!r})\n"
        "lock = LeasedObject(objects, 'lock')\n"
        "assert lock.acquire()\n"
        "lock.write('left')\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environ)
    lock = make(Clock())
    assert lock.acquire()
    assert lock.data == "left"


def test_a_lock_is_free_at_once_for_whom_it_may_follow(make):
    one, other = make(Clock(), "attempt 1"), make(Clock())
    assert one.acquire()
    assert not other.acquire(lambda owner: "attempt 2" in owner)
    assert other.acquire(lambda owner: "attempt 1" in owner)
    with pytest.raises(Lost):
        one.renew()


def test_an_object_of_something_else_is_not_overwritten(make):
    bucket = make.bucket
    bucket.replace("lock", b"{}", None)
    with pytest.raises(OSError, match="lock is not of tfmw, or damaged"):
        make(Clock()).acquire()
    assert bucket.read("lock")[0] == b"{}"
