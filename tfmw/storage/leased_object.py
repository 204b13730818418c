"""A small object that one process at a time may write: a lock and its data in one.

    leased = LeasedObject(Bucket("s3://bucket/run7", quick=True), "LEADER")
    leased.acquire()                 # whether this process holds it now; `data` is the last data
    leased.held_until                # monotonic seconds until which it surely holds it; 0: not held
    leased.renew()                   # extends that; raises Lost
    leased.write({"steps": [12]})    # if it raises Lost, nothing is written
    leased.release()

Each change of the object replaces the version that its holder has written last, and a new holder
replaces it once. So a holder that was paused, or cut off, cannot write after another one took over,
for any duration of the pause and any clocks. The store compares the versions; clocks only determine
when the next process tries. A waiting process takes over once the object has not changed for TTL_S
seconds of its own clock; a holder is certain of its lock for a shorter time.

The object is in a bucket, or a file in a directory (`DirectoryObjects`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfmw.errors import TfmwError
from tfmw.storage.bucket import Bucket, Version
from tfmw.storage.disk import file_lock, flush, replacing

TTL_S = 10.0
"""Seconds without a change after which another process takes the object over."""

BEAT_S = 2.5
"""Seconds between two renewals."""

_MARGIN_S = 2.0  # time by which a holder is certain for less, for the delay of its last messages

_NOTHING = b'{"token": "", "data": null}'

Clock = Callable[[], float]


class Lost(TfmwError):
    """Error of a process that does not hold the lock, or cannot know whether it does."""


class DirectoryObjects:
    """Small files of a directory with the conditional writes of a `Bucket`.

    Args:
        url: the local directory.
    """

    def __init__(self, url: str):
        self.url = url

    def read(self, name: str) -> tuple[bytes, Version] | None:
        try:
            data = Path(self.url, name).read_bytes()
        except FileNotFoundError:
            return None
        return data, data  # no two contents are equal

    def replace(self, name: str, data: bytes, version: Version | None) -> Version | None:
        path = os.path.join(self.url, name)
        with file_lock(f"{path}.lock", patience_s=_MARGIN_S):
            found = self.read(name)
            if (found and found[1]) != version:
                return None
            with replacing(path) as temporary:
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                    file.write(data)
                flush(temporary)
            flush(self.url)
        return data


class LeasedObject:
    """The lock of an object, and its data.

    Args:
        bucket: the bucket or directory of the object.
        name: name of the object.
        owner: further text about the holder, which other processes read.
        clock: monotonic seconds.

    Each call may wait for the network, and raises OSError if its result cannot be known now.
    """

    def __init__(
        self,
        bucket: Bucket | DirectoryObjects,
        name: str,
        owner: str = "",
        clock: Clock = time.monotonic,
    ) -> None:
        self.data: Any = None  # the data that was read or written last
        self.holder = ""  # the holder at the last read; "" for none
        self.held_until = 0.0
        self._bucket, self._name, self._clock = bucket, name, clock
        self._own = {
            "token": secrets.token_hex(8),
            "owner": f"process {os.getpid()} on {socket.gethostname()}{owner and f', {owner}'}",
            "machine": _machine(),
            "pid": os.getpid(),
        }
        # The version that was read or written last, and the time when this process saw it first.
        self.since = 0.0
        self._version: Version | None = None
        self._content: dict[str, Any] = {"token": ""}
        self._mutex = threading.RLock()

    def look(self) -> Any:
        """Reads the object; returns its data, None if it does not exist."""
        with self._mutex:
            text, version = self._bucket.read(self._name) or (_NOTHING, None)
            if version != self._version:
                self._version, self.since = version, self._clock()
            try:
                self._content = json.loads(text)
                self.data = self._content["data"]
                self.holder = self._content["owner"] if self._content["token"] else ""
            except (ValueError, KeyError, TypeError) as error:
                raise OSError(
                    f"{self._bucket.url}/{self._name} is not of tfmw, or damaged"
                ) from error
            return self.data

    def acquire(self, may_follow: Callable[[str], bool] = lambda owner: False) -> bool:
        """Takes the lock if it is free; returns whether this process holds it now.

        Args:
            may_follow: whether the lock of this owner, which has ended, is free at once.
        """
        with self._mutex:
            if self.held_until:
                return True
            asked = self._clock()
            self.look()
            waited = self._clock() - self.since >= TTL_S
            if self._content["token"] not in ("", self._own["token"]) and not (
                waited or _is_gone(self._content) or may_follow(self.holder)
            ):
                return False
            if not self._put(self.data):
                return False
            self.held_until = asked + TTL_S - _MARGIN_S
            return True

    def renew(self) -> None:
        """Renews the lock. Raises Lost."""
        with self._mutex:
            self.write(self.data)

    def write(self, data: Any) -> None:
        """Replaces the data.

        Raises:
            Lost: another process has taken the lock over; nothing is written.
            OSError: it is unknown whether the data was written.
        """
        with self._mutex:
            asked = self._clock()
            while self._content["token"] == self._own["token"]:
                if self._put(data):
                    self.held_until = asked + TTL_S - _MARGIN_S
                    return
                # the content of another process, or of this one if its response was lost
                self.look()
            self.held_until = 0.0
            raise Lost(f"another process has taken over {self._bucket.url}/{self._name}")

    def _put(self, data: Any, **changes: str) -> bool:
        """Replaces the version that was seen last, with new content and so a new ETag."""
        content = {**self._own, "nonce": secrets.token_hex(8), "data": data, **changes}
        text = json.dumps(content).encode()
        version = self._bucket.replace(self._name, text, self._version)
        if version is None:
            return False
        self._version, self.since = version, self._clock()
        self._content, self.data = content, data
        return True

    def release(self) -> None:
        """Releases the lock if this process holds it; the data stays."""
        with self._mutex, contextlib.suppress(OSError):  # the lock expires by itself
            self.held_until = 0.0
            if self._content["token"] == self._own["token"]:
                self._put(self.data, token="")


def _machine() -> str:
    """Identity of the machine or container whose process numbers apply to this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return secrets.token_hex(8)


def _is_gone(content: dict[str, Any]) -> bool:
    """Whether an object's holder is a process of this machine that has ended."""
    if content.get("machine") != _machine():
        return False
    try:
        os.kill(int(content["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return False
