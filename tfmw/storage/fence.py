"""Fence between attempts of a run: only the attempt with the last recorded number may write.

    check()                        # raises Fenced in a task of a superseded attempt

Hosts that were cut off from the others cannot know at once that these continued without them. So
shared files are renamed to their final names only by tasks of the last attempt. A task compares its
attempt (TFMW_ATTEMPT) with the record of the run's leader. TFMW_FENCE names the record, a
`LeasedObject`. A process without this variable may always write.
"""

from __future__ import annotations

import os
import re
from typing import Any

from tfmw.errors import TfmwError
from tfmw.storage.bucket import Bucket, is_bucket
from tfmw.storage.leased_object import DirectoryObjects, LeasedObject

FENCE = "TFMW_FENCE"
"""Variable that names the record: "/shared/run7/LEADER", or "s3://bucket/run7/LEADER"."""

ATTEMPT = "TFMW_ATTEMPT"


class Fenced(TfmwError):
    """Error in a task of an attempt that another one has superseded."""


def attempt() -> int:
    """Number of this process's attempt; 0 if no launcher started it."""
    return int(os.environ.get(ATTEMPT) or 0)


def check() -> None:
    """Raises Fenced if a later attempt has been recorded.

    Raises:
        Fenced: this attempt may not write any more.
        OSError: the record cannot be read.
    """
    place = os.environ.get(FENCE)
    if not place:
        return
    last = _record(place)["attempt"]
    if last > attempt():
        raise Fenced(
            f"this task belongs to attempt {attempt()}, and other hosts have begun attempt {last} "
            "without it: it writes nothing any more."
        )


def owner() -> str:
    """Name of this attempt and its run, for the locks of files that it writes; "" without a record.

    Raises:
        OSError: the record cannot be read.
    """
    place = os.environ.get(FENCE)
    return f"attempt {attempt()} of run {_record(place)['run']}" if place else ""


def precedes(text: str) -> bool:
    """Whether a result of `owner` in another process names an earlier attempt of this run.

    Raises:
        OSError: the record cannot be read.
    """
    holder, own = (re.search(r"attempt (\d+) of run (\w+)", t) for t in (text, owner()))
    if holder is None or own is None:
        return False
    return holder[2] == own[2] and int(holder[1]) < int(own[1])


def _record(place: str) -> dict[str, Any]:
    folder, _, name = place.rpartition("/")
    objects = Bucket(folder, quick=True) if is_bucket(place) else DirectoryObjects(folder)
    record = LeasedObject(objects, name).look()
    if not isinstance(record, dict) or not isinstance(record.get("attempt"), int):
        raise OSError(f"{place} has no record of attempts")
    return record
