"""A job on Ray, from outside: its controller actor, which may be busy, dead, or cut off."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from tfmw.engines import job as jobs
from tfmw.errors import TfmwError

READ = 4 << 20  # bytes of a file in one call
_REPLY_S = 10.0  # in which a controller replies
# Ray needs up to 70 s to find that a node is lost: five checks of 10 s, 3 s between two of them.
_UNAVAILABLE_S = 100.0  # for which a controller may not be reached before the caller learns of it
_HEAD_S = 20.0  # and for which Ray's head may not be; after 60 s Ray ends the process
_RETRY_S = 0.2


class _Gone(Exception):
    """The job's controller is lost; `RayHandle.why` has the reason."""


class RayHandle:
    """A job's controller actor, from any process of the cluster.

    A call that gets lost, as on a busy node, says nothing about the job: Ray then calls the actor
    unavailable, by a subclass of the error of a dead one. Without its head Ray replies nothing at
    all, and ends this process after a minute.

    Args:
        ray: the module.
        actor: the controller's.
        head: address of the head, "host:port".
    """

    def __init__(self, ray: Any, actor: Any, head: str) -> None:
        self._ray = ray
        self._actor = actor
        self._head = head
        self._head_gone_since: float | None = None
        self.why = ""

    def read(self, name: str, offset: int = 0) -> bytes:
        """See `JobHandle.read`."""
        found = bytearray()
        with contextlib.suppress(self._ray.exceptions.RayActorError, _Gone):
            while True:
                piece = self._call("read", name, offset + len(found))
                found += piece
                if len(piece) < READ:  # another call could read a file that has been replaced
                    break
        return bytes(found)

    def state(self) -> str:
        """See `JobHandle.state`."""
        try:
            self._look_at_head()  # the controller may reply for a while without it
            self._call("read", jobs.STATUS, 0, patience_s=0)
            return "running"
        except _Gone:
            return "lost"
        except TfmwError:
            return ""
        except self._ray.exceptions.RayActorError as error:
            self.why = f"its controller on the cluster was lost: {reason(error)}"
            return "lost"

    def cancel(self) -> None:
        """See `JobHandle.cancel`."""
        with contextlib.suppress(self._ray.exceptions.RayActorError, _Gone):
            self._call("cancel")

    def kill(self) -> None:
        """See `JobHandle.kill`: tasks and placement group belong to the actor."""
        self._ray.kill(self._actor)

    def forget(self) -> None:
        """See `JobHandle.forget`."""
        with contextlib.suppress(self._ray.exceptions.RayActorError):
            try:
                self._call("remove")
            except _Gone:
                return
        self._ray.kill(self._actor)

    def _call(self, method: str, *args: Any, patience_s: float = _UNAVAILABLE_S) -> Any:
        """The result of a method of the actor, also if it has to be called again.

        Raises:
            _Gone: Ray's head is lost, or the actor was found dead before.
            RayActorError: the actor has died.
            TfmwError: neither is known, and the patience is over.
        """
        if self.why:
            raise _Gone
        deadline = time.monotonic() + patience_s
        errors = self._ray.exceptions
        while True:
            try:
                call = getattr(self._actor, method).remote(*args)
                return self._ray.get(call, timeout=_REPLY_S)
            except (errors.ActorUnavailableError, errors.GetTimeoutError):
                self._look_at_head()
            if time.monotonic() > deadline:
                raise TfmwError(
                    f"the controller of the job did not reply for {patience_s:g} s, and Ray does "
                    "not know whether it is alive: look at the node that it is on, and call again."
                )
            time.sleep(_RETRY_S)

    def _look_at_head(self) -> None:
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_REPLY_S).close()
            self._head_gone_since = None
        except OSError as error:
            now = time.monotonic()
            self._head_gone_since = self._head_gone_since or now
            if now - self._head_gone_since > _HEAD_S:
                self.why = (
                    f"Ray's head at {self._head} has not been reachable for {_HEAD_S:g} s "
                    f"({error.strerror or error}), and without it Ray ends all tasks, and soon "
                    "this process: start the cluster and the job again; a fit with a backup_dir "
                    "resumes"
                )
                raise _Gone from error


def reason(error: Exception) -> str:
    """The line of Ray's message that says what happened."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    # "The actor died ...:", lines such as "\tclass_name: ...", then the reason
    told = [line for line in lines[1:] if not line.startswith("\t")]
    return (told or lines or [type(error).__name__])[0].strip()
