"""The pods of a job on Kubernetes: the controller, and the tasks that it starts.

python -m tfmw.launcher.engines.kubernetes_tasks control 3fa9c2 [DIRECTORY]
python -m tfmw.launcher.engines.kubernetes_tasks task 3fa9c2
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tfmw.cluster import sockets
from tfmw.cluster.signals import Signals
from tfmw.errors import PREEMPTED, UsageError
from tfmw.launcher.engines import folder, folder_server, own_files
from tfmw.launcher.engines import kubernetes_objects as objects
from tfmw.launcher.engines.agent import CONTACT, PAYLOAD, run_task
from tfmw.launcher.engines.controller import INTERRUPTED
from tfmw.launcher.engines.engine import Contact, Layout, Tasks
from tfmw.launcher.engines.job import ENDED, STATUS
from tfmw.launcher.engines.kubernetes_api import Api, Pods, Unreachable
from tfmw.launcher.remote import messages

TASKS = "tasks.json"
"""File of the job: the tasks' Job."""

_KEEP_S = 24 * 3600.0  # time for which the result of a job that has ended can be fetched
_BEGIN_S = 600.0  # time for the submitting process to send the call
_LOOK_EVERY_S = 2.0  # interval between two lists of pods
_FEWER_S = 10.0  # time after which a job with workers=(2, 8) starts with the pods that run
_END_S = 60.0  # time for the pods of an attempt to end
_RETRY_S = 0.5


def port_of(number: str) -> int:
    """Port of a job's controller, which differs between jobs as pods may share a host's network."""
    return 20_000 + int(number, 16) % 10_000


class KubernetesTasks(Tasks):
    """Pods of an indexed Job, a new one for each attempt.

    Their number is the largest one of the job. An attempt starts with those that run, once it has
    enough of them; the others wait for room, and then for the next attempt.
    """

    tells_s = 5.0

    def __init__(self, where: Path, number: str, returns: bool) -> None:
        self.folder, self.requeues = where, returns
        self._api, self._number = Api.connected(patience_s=0), number
        self._template = json.loads((where / TASKS).read_text())
        self._pods: Pods | None = None  # pods of the attempt's Job
        self._created = False  # whether that exists
        self._ranks: dict[int, int] = {}  # completion index of a pod -> rank
        self._running: list[int] = []
        self._since = self._look_at = 0.0
        self._remove_jobs()  # those of a controller that was lost

    def hosts(self) -> tuple[str, ...]:
        return (os.environ[objects.ADDRESS],)

    def available(self, least: int, most: int) -> int:
        if self._pods is None:
            name = f"{objects.name_of(self._number)}-{secrets.token_hex(3)}"
            self._pods = Pods(self._api, name)
            self._created, self._running = False, []
        if not self._look():
            return 0
        pods, running, now = self._pods, self._pods.running, time.monotonic()
        if len(pods.found) == most and most - len(pods.problems) < least:
            return least  # the attempt fails with the reasons
        if running != self._running:
            self._running, self._since = running, now
        enough = len(running) >= least and now - self._since > _FEWER_S
        return len(running) if enough or len(running) == most else 0

    def room(self, most: int) -> int:
        self._look()
        return len(self._pods.running) if self._pods else 0

    def start(self, layout: Layout, contact: Contact) -> None:
        assert self._pods is not None
        self._pods.started = True
        chosen = sorted(self._pods.found, key=lambda index: index not in self._running)
        chosen = chosen[: len(layout)]
        self._ranks = {index: rank for rank, index in enumerate(sorted(chosen))}
        content = {"ranks": self._ranks, "contact": dataclasses.asdict(contact)}
        own_files.write(self.folder / CONTACT, json.dumps(content).encode())

    def lost(self) -> dict[int, str]:
        self._look()
        found = self._pods.problems if self._pods else {}
        return {rank: found[index] for index, rank in self._ranks.items() if index in found}

    def end(self) -> None:
        self._ranks = {}
        if self._pods is not None:
            self._pods = None
            self._remove_jobs()

    def close(self) -> None:
        self.end()

    def _look(self) -> bool:
        """Lists the attempt's pods if the last list is old; returns whether it did."""
        if self._pods is None or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        try:
            self._created = self._created or self._create(self._pods.job)
            self._pods.look()
        except Unreachable as error:
            self.why = str(error)
            return False
        self.why = self._pods.why
        return True

    def _create(self, name: str) -> bool:
        """Creates the attempt's Job."""
        owner = self._api.get("Jobs", objects.name_of(self._number))
        if owner is None:
            raise UsageError(f"the Job {objects.name_of(self._number)} was deleted")
        here = {"name": objects.CONTROLLER, "value": os.environ[objects.ADDRESS]}
        container = {"name": objects.CONTAINER, "env": [here]}
        own = {
            "metadata": {"name": name, "ownerReferences": [objects.owner(owner)]},
            "spec": {"template": {"spec": {"containers": [container]}}},
        }
        self._api.create("Jobs", objects.merged(self._template, own))
        return True

    def _remove_jobs(self) -> None:
        """Deletes the tasks' Jobs and their contact, and waits until no pod of them runs."""
        (self.folder / CONTACT).unlink(missing_ok=True)
        which = f"{objects.JOB}={self._number},{objects.ROLE}=task"
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            with contextlib.suppress(Unreachable):
                for job in self._api.listed("Jobs", which):
                    self._api.delete("Jobs", job["metadata"]["name"])
                # The tasks in pods of a node that does not reply end by themselves.
                if all(map(objects.ended, self._api.listed("pods", which))):
                    return
            time.sleep(_RETRY_S)


# ---- processes of the pods -----------------------------------------------------------------------


def _control(number: str, directory: str = "") -> int:
    """Runs the controller, and then serves the results of the job."""
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Signals())
        if directory:
            where = Path(directory) / number
            where.mkdir(parents=True, exist_ok=True, mode=0o700)
        else:
            where = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tfmw-job-")))
        listener = sockets.listen(port=port_of(number))
        server = folder_server.FolderServer(listener, os.environ[objects.TOKEN].encode(), where)
        stack.callback(server.close)
        if not _waited(stop, _BEGIN_S, (where / folder.SPEC).exists):
            return PREEMPTED  # nobody has sent the call
        status = json.loads(own_files.read(where, STATUS) or '{"state": ""}')
        if status["state"] not in ENDED:  # a pod that only served the results may have been lost
            tasks = functools.partial(KubernetesTasks, number=number, returns=bool(directory))
            if folder.control(where, tasks, stop) in ("queued", INTERRUPTED):
                return PREEMPTED  # the pod is replaced
        _waited(stop, _KEEP_S, lambda: False)
    return PREEMPTED if stop.received else 0


def _waited(stop: Signals, limit_s: float, until: Callable[[], bool]) -> bool:
    """Waits for a condition, for a while or until a signal; returns whether it holds."""
    deadline = time.monotonic() + limit_s
    while not (found := until()) and not stop.received and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
    return found


def _run_task(number: str) -> int:
    """Waits until an attempt needs this pod's task, and runs it."""
    address = os.environ[objects.CONTROLLER], port_of(number)
    token, index = os.environ[objects.TOKEN], os.environ[objects.INDEX]
    files = folder_server.FolderClient(
        token.encode(), lambda: socket.create_connection(address, _BEGIN_S)
    )
    nothing = '{"ranks": {}}'
    while index not in (told := json.loads(files.read(CONTACT) or nothing))["ranks"]:
        time.sleep(_RETRY_S)
    contact, rank = messages.built(Contact, told["contact"]), told["ranks"][index]
    run_task(contact, rank, lambda: [files.read(PAYLOAD)], os.environ[objects.POD])
    return 0


def _leave(*_: object) -> None:
    sys.exit(PREEMPTED)


if __name__ == "__main__":
    # The first process of a container ignores signals that it does not handle.
    signal.signal(signal.SIGTERM, _leave)
    role, *arguments = sys.argv[1:]
    sys.exit(_control(*arguments) if role == "control" else _run_task(*arguments))
