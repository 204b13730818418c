"""The process that an engine starts for each task: runs it as a child, connected to its job.

    run_task(contact, rank=1, payload=lambda: [data], host="h1")
    python -m tfmw.launcher.engines.agent FOLDER RANK  # the same, by files of a shared folder

The agent reserves a port, sends a hello to the controller and executes its requests: unpack a
backup, start the task, end it. It sends back output, progress, backups and the
result. When the connection is lost it ends the task. Nothing here imports TensorFlow; the task
does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import queue
import socket
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfmw.cluster.cluster import TOKEN
from tfmw.cluster.signals import Signals
from tfmw.cluster.sockets import reserved_ports
from tfmw.cluster.versions import common_versions
from tfmw.errors import TfmwError
from tfmw.launcher import call
from tfmw.launcher.attempt import SETTLE_S, AttemptContext
from tfmw.launcher.engines import own_files
from tfmw.launcher.engines.engine import TIMING, Contact
from tfmw.launcher.environment import task_environment
from tfmw.launcher.options import LocalRun
from tfmw.launcher.output import Display
from tfmw.launcher.process import task_name
from tfmw.launcher.remote import messages
from tfmw.launcher.remote.links import Links, secret_of_tasks
from tfmw.launcher.remote.tasks import TasksOfOneMachine
from tfmw.launcher.run_status import RunStatus
from tfmw.launcher.spawn import Spawner

CONTACT, PAYLOAD = "contact.json", "payload"
"""Files that the controller writes into the folder of a job, if all hosts share it."""

BACKUPS = "TFMW_JOB_BACKUPS"
"""Variable of each task: a folder of its own whose newest backup the job keeps."""

_LOOK_S = 0.05  # seconds between two checks of the task
_TELL_S = 0.5  # seconds between two reports of progress
_BACKLOG = 1 << 20  # bytes that may be unsent when a backup is added
_FAREWELL_S = 60.0  # time for the controller to take the result


def run_task(
    contact: Contact, rank: int, payload: Callable[[], call.Payload], host: str | None = None
) -> None:
    """Runs one task of a job, until it has ended and its result is sent.

    Args:
        contact: addresses and token of the controller.
        rank: rank of the task.
        payload: returns the packed call; called just before the task starts.
        host: this machine's name in messages; by default the system's.

    Raises:
        TfmwError: the controller cannot be reached.
    """
    _Agent(contact, rank, payload, host or socket.gethostname()).run()


class _Forward(Display):
    """Sends the output of a task to the controller, which prints it."""

    def __init__(self, links: Links) -> None:
        super().__init__(io.StringIO())
        self._links = links

    def feed(self, task: str, data: bytes, final: bool = False) -> None:
        self._links.to_leader(messages.Output(final, data))

    def line(self, text: str) -> None:
        self._links.to_leader(messages.Line(text))


@dataclasses.dataclass
class _Agent:
    """One task, and its connection; see `run_task`."""

    contact: Contact
    rank: int
    payload: Callable[[], call.Payload]
    host: str

    def run(self) -> None:
        """Serves the controller until the task has ended."""
        with contextlib.ExitStack() as self.stack, contextlib.ExitStack() as ports:
            folder = tempfile.TemporaryDirectory(prefix="tfmw-task-", ignore_cleanup_errors=True)
            self.folder = Path(self.stack.enter_context(folder))
            self.backups = self.folder / "backups"  # the job keeps the newest of them
            self.sent_backup = ""
            self.inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
            links = Links(self.contact.token.encode(), self.inbox.put, TIMING)
            self.links = self.stack.enter_context(links)
            (port,) = ports.enter_context(reserved_ports(1))
            own = self.rank, self.contact.attempt, self.host
            self.links.dial(
                "controller",
                [(host, self.contact.port) for host in self.contact.hosts],
                lambda address: messages.AgentHello(*own, address, port, common_versions()),
            )
            wait_connected(self.inbox)
            while (message := self._next()) is not None:
                match message:
                    case messages.BackupFiles(body=body):
                        self.sent_backup = str(self.backups / unpack(body, self.backups))
                    case messages.Setup(start=messages.Start() as start):
                        tasks = self._set_up(message, start.tasks)
                        ports.close()
                        tasks.do(start)
                        self._watch(tasks)
                        return
                    case messages.End():
                        return

    def _next(self, timeout_s: float | None = None) -> messages.Message | None:
        """The controller's next message; None if the connection is lost. Raises queue.Empty."""
        event, *arguments = self.inbox.get(timeout=timeout_s)
        message: messages.Message | None = arguments[0] if event == "from_leader" else None
        return message

    # ---- before the start ------------------------------------------------------------------------

    def _set_up(
        self, setup: messages.Setup, layout: Sequence[tuple[str, int]]
    ) -> TasksOfOneMachine:
        with contextlib.suppress(OSError):
            self.stack.enter_context(contextlib.chdir(setup.folder))
        secret = secret_of_tasks(self.contact.token.encode())
        own = {TOKEN: secret, call.ELSEWHERE: self.host, BACKUPS: str(self.backups)}
        own["COLUMNS"] = str(setup.columns)  # a task's terminal gets this width
        command = list(setup.command)
        if command[0] == "script" and not os.path.isfile(command[1]):
            script = self.folder / "script" / os.path.basename(command[1])
            script.parent.mkdir()
            script.write_bytes(setup.body)
            command[1] = str(script)
        payload = self.payload() if command[0] == "call" and not setup.stays else None
        context = AttemptContext(
            run=LocalRun(command, layout, setup.options, payload=payload, stays=setup.stays),
            directory=self.folder / "run",
            status=RunStatus(self.folder / "run", command),  # the job shows it
            env=task_environment({**os.environ, **own, **setup.env}, setup.live),
            spawner=self.stack.enter_context(Spawner()),
            display=_Forward(self.links),
            live=task_name(*layout[0]) if setup.live else None,
            stop=Signals(),  # the agent gets the signals, not the attempt
        )
        tasks = TasksOfOneMachine(context, env=setup.own_env, settle_s=SETTLE_S)
        self.stack.callback(tasks.close)
        return tasks

    # ---- the task --------------------------------------------------------------------------------

    def _watch(self, tasks: TasksOfOneMachine) -> None:
        """Waits until the task has ended, and the controller has its result or is gone."""
        told, wanted, ended = 0.0, True, None
        stop, signals = self.stack.enter_context(Signals()), 0
        while ended is None:
            found = tasks.look(_LOOK_S)
            ended = found if isinstance(found, messages.Ended) else None
            if len(stop.received) > signals:
                signals = len(stop.received)
                if stop.asks_to_leave:  # this machine will end: all tasks save their state
                    self.links.to_leader(messages.Leaving())
                else:
                    ended = ended or tasks.end()
            if isinstance(found, messages.Answer | messages.RestartRequest):
                self._send_backup()
                self.links.to_leader(found)
            with contextlib.suppress(queue.Empty):
                message = self._next(0.0)
                if message is None or isinstance(message, messages.End):
                    wanted, ended = False, ended or tasks.end()
                elif isinstance(message, messages.Call | messages.Leave | messages.RestartReply):
                    tasks.do(message)
            if time.monotonic() - told >= _TELL_S:
                told = time.monotonic()
                self.links.to_leader(messages.StepReached(tasks.step, tasks.division))
                if self.links.backlog < _BACKLOG:  # the previous backup has been sent
                    self._send_backup()
        self._send_backup()
        self.links.to_leader(ended)
        deadline = time.monotonic() + _FAREWELL_S
        with contextlib.suppress(queue.Empty):
            while wanted:
                message = self._next(max(0.0, deadline - time.monotonic()))
                wanted = not (message is None or isinstance(message, messages.End))

    def _send_backup(self) -> None:
        """Sends the newest complete backup, if the controller does not have it."""
        try:
            # The calls of a task that stays have a folder each.
            newest = max(self.backups.glob("**/step_*"), key=lambda path: path.stat().st_mtime_ns)
            if str(newest) != self.sent_backup:
                self.links.to_leader(messages.BackupFiles(newest.name, packed(newest)))
                self.sent_backup = str(newest)
        except (ValueError, OSError):  # there is none yet, or a newer one has just replaced it
            return


def wait_connected(
    inbox: queue.SimpleQueue[tuple[Any, ...]],
    timeout_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Waits for the connection to the controller.

    Raises:
        TfmwError: none of its addresses could be reached in time.
    """
    deadline = clock() + timeout_s
    while (event := inbox.get())[0] != "leader_connected":
        problems = ", ".join(f"{host}:{port} ({why})" for (host, port), why in event[3].items())
        if clock() > deadline:
            raise TfmwError(
                f"this task reached its job's controller at none of {problems}: let the hosts of "
                "the job connect to each other on all TCP ports."
            )


def packed(directory: Path) -> bytes:
    """A directory as a tar archive."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(directory, directory.name)
    return archive.getvalue()


def unpack(archive: bytes, folder: Path) -> str:
    """Writes the directory of an archive into `folder`; returns its name."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
        return tar.getnames()[0]


def main(folder: Path, rank: int, host: str | None) -> None:
    """Runs a task of a job whose controller has left `contact.json` and the call in a folder."""
    if not (data := own_files.read(folder, CONTACT)):
        sys.exit(
            f"tfmw: the folder of the job, {folder}, has no file {CONTACT} here: it must be one "
            "that all hosts share; see directory= of the engine."
        )
    contact = messages.built(Contact, json.loads(data))
    run_task(contact, rank, lambda: [own_files.read(folder, PAYLOAD)], host)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), None)
