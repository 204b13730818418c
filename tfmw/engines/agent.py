"""What an engine starts for each task: runs it as a child process, and connects it to its job.

    run_task(contact, rank=1, payload=lambda: [data], host="h1")
    python -m tfmw.engines.agent FOLDER RANK      # the same, by the files of a shared folder

The agent reserves a port, introduces itself to the controller and does what that asks for: look at
a directory, unpack a backup, start the task, end it. It sends back output, progress, backups and
the result. When the connection is lost it ends the task. Nothing here imports TensorFlow; the task
does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import io
import json
import os
import queue
import shutil
import socket
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfmw.cluster import check_directories
from tfmw.cluster.check_findings import Findings
from tfmw.engines import link as links
from tfmw.engines import own_files
from tfmw.engines.engine import Contact, versions
from tfmw.engines.link import Link, Message
from tfmw.launcher import call
from tfmw.launcher.attempt import Attempt, AttemptContext
from tfmw.launcher.environment import task_environment
from tfmw.launcher.options import RunOptions
from tfmw.launcher.output import Display
from tfmw.launcher.restart import RestartPolicy
from tfmw.launcher.snapshot import Board
from tfmw.launcher.spawn import Spawner
from tfmw.remote import messages
from tfmw.remote.channel import Forged
from tfmw.remote.tasks import report_of
from tfmw.runtime.ports import reserved_ports
from tfmw.runtime.signals import Signals

CONTACT, PAYLOAD = "contact.json", "payload"
"""Files that the controller writes into the folder of a job, where all hosts share it."""

BACKUPS = "TFMW_JOB_BACKUPS"
"""Variable of each task: a folder of its own whose newest backup the job keeps."""

_LOOK_S = 0.05  # seconds between two looks at the task
_TELL_S = 0.5  # seconds between two reports of progress
_MARKER_S = 10.0  # in which a file must appear in a directory that several hosts share
_FAREWELL_S = 60.0  # in which the controller takes the result


def run_task(
    contact: Contact, rank: int, payload: Callable[[], call.Payload], host: str | None = None
) -> None:
    """Runs one task of a job, until it has ended and its result is sent.

    Args:
        contact: how to reach the controller.
        rank: which task.
        payload: returns the packed call; called just before the task starts.
        host: this machine's name in messages; by default the system's.

    Raises:
        TfmwError: the controller cannot be reached.
    """
    link = links.connect(contact.addresses, contact.token)
    folder = Path(tempfile.mkdtemp(prefix="tfmw-task-"))
    try:
        _Agent(link, contact, rank, payload, host or socket.gethostname(), folder).run()
    finally:
        link.close()
        shutil.rmtree(folder, ignore_errors=True)


class _Forward(Display):
    """Sends the output of a task to the controller, which prints it."""

    def __init__(self, link: Link) -> None:
        super().__init__(io.StringIO())
        self._link = link

    def feed(self, task: str, data: bytes, final: bool = False) -> None:
        self._link.send("output", data, final=final)

    def line(self, text: str) -> None:
        self._link.send("line", text=text)


class _Agent:
    """One task, and its connection.

    Args:
        link: to the controller.
        contact: of the job.
        rank: of the task.
        payload: see `run_task`.
        host: this machine's name.
        folder: of this task, removed at its end.
    """

    def __init__(
        self,
        link: Link,
        contact: Contact,
        rank: int,
        payload: Callable[[], call.Payload],
        host: str,
        folder: Path,
    ) -> None:
        self._link = link
        self._contact = contact
        self._rank = rank
        self._payload = payload
        self._host = host
        self._folder = folder
        self._backups = folder / "backups"
        self._sent_backup = ""
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._stack = contextlib.ExitStack()

    def run(self) -> None:
        """Serves the controller until the task has ended."""
        with self._stack, contextlib.ExitStack() as ports:
            (port,) = ports.enter_context(reserved_ports(1))
            self._link.send(
                "hello",
                rank=self._rank,
                attempt=self._contact.attempt,
                host=self._host,
                address=self._link.local_host,
                port=port,
                facts=versions(),
            )
            threading.Thread(target=self._listen, name="tfmw-controller", daemon=True).start()
            while (message := self._inbox.get()) is not None:
                if message.kind == "start":
                    ports.close()
                    self._train(message.fields)
                    return
                if message.kind in ("refused", "end"):
                    return
                self._prepare(message)

    def _listen(self) -> None:
        try:
            while True:
                self._inbox.put(self._link.receive())
        except (OSError, Forged, ValueError):
            self._inbox.put(None)

    # ---- before the start ------------------------------------------------------------------------

    def _prepare(self, message: Message) -> None:
        fields = message.fields
        if message.kind == "mark":
            problems: list[str] = []
            names = self._stack.enter_context(
                check_directories.markers(fields["directories"], Findings(problems.append))
            )
            self._link.send("marked", names=names, problems=problems)
        elif message.kind == "look":
            problems = []
            findings = Findings(
                lambda line: None if line.startswith("ok") else problems.append(line)
            )
            for option, path in fields["directories"].items():
                name, chief = fields["names"][option], fields["chief"]
                check_directories.find_marker(option, path, name, chief, findings, _MARKER_S)
            self._link.send("looked", problems=problems)
        elif message.kind == "backup":
            self._sent_backup = unpack(message.body, self._backups)
        elif message.kind == "script":
            (self._folder / "script").mkdir()
            (self._folder / "script" / fields["name"]).write_bytes(message.body)

    # ---- the task --------------------------------------------------------------------------------

    def _train(self, fields: dict[str, Any]) -> None:
        with Signals() as stop, Spawner() as spawner:
            context = self._context(fields, spawner, stop)
            attempt = Attempt(
                context,
                [("worker", fields["index"])],
                fields["attempt"],
                RestartPolicy(context.options, 1),
                cluster=fields["cluster"],
                env=fields["env"],
            )
            try:
                attempt.start()
                self._watch(attempt)
                attempt.end(0.0)
            finally:
                attempt.end(0.0)
        self._send_backup()
        ended = messages.Ended(attempt.number, report_of(attempt, self._rank))
        (result,) = attempt.results().values() or [b""]
        self._link.send("ended", result, report=messages.encode(ended).decode())
        deadline = time.monotonic() + _FAREWELL_S
        with contextlib.suppress(queue.Empty):
            while (message := self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))) and (
                message.kind != "bye"
            ):
                pass

    def _context(self, fields: dict[str, Any], spawner: Spawner, stop: Signals) -> AttemptContext:
        with contextlib.suppress(OSError):
            self._stack.enter_context(contextlib.chdir(fields["folder"]))
        os.environ["COLUMNS"] = str(fields["columns"])  # a task's terminal gets this width
        environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        secret = hmac.digest(self._contact.token.encode(), b"tfmw tasks", "sha256").hex()
        environ |= {"TFMW_TOKEN": secret, call.ELSEWHERE: self._host, BACKUPS: str(self._backups)}
        command = list(fields["command"])
        if command[0] == "script" and not os.path.isfile(command[1]):
            command[1] = str(self._folder / "script" / os.path.basename(command[1]))
        return AttemptContext(
            command=command,
            directory=self._folder / "run",
            board=Board(self._folder / "run", command),
            env=task_environment({**environ, **fields["job_env"]}, fields["live"]),
            spawner=spawner,
            display=_Forward(self._link),
            live=f"worker {fields['index']}" if fields["live"] else None,
            payload=self._payload() if command[0] == "call" else None,
            stop=stop,
            options=RunOptions(**fields["options"]),
        )

    def _watch(self, attempt: Attempt) -> None:
        """Returns once the task has ended, or the controller wants it to."""
        leave, told = False, 0.0
        while not attempt.is_over(_LOOK_S):
            with contextlib.suppress(queue.Empty):
                message = self._inbox.get_nowait()
                if message is None or message.kind == "end":
                    return
                leave = leave or message.kind == "leave"
            if leave and attempt.ask_to_leave():
                leave = False
            if time.monotonic() - told >= _TELL_S:
                told = time.monotonic()
                self._link.send("progress", step=attempt.step())
                self._send_backup()

    def _send_backup(self) -> None:
        """Sends the newest complete backup, if the controller does not have it."""
        try:
            newest = max(p.name for p in self._backups.glob("step_*"))
            if newest != self._sent_backup:
                self._link.send("backup", packed(self._backups / newest), name=newest)
                self._sent_backup = newest
        except (ValueError, OSError):  # none yet, or it has just been replaced by a newer one
            return


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
    """Runs a task of a job whose controller has left `contact.json` and the call in a folder.

    Args:
        folder: of the job, which all hosts see.
        rank: of the task.
        host: this machine's name in messages.
    """
    try:
        contact = Contact(**json.loads(own_files.read(folder, CONTACT)))
    except OSError as error:
        sys.exit(
            f"tfmw: the folder of the job, {folder}, cannot be read here ({error.strerror}): it "
            "must be one that all hosts share; see directory= of the engine."
        )
    contact = dataclasses.replace(contact, hosts=tuple(contact.hosts))
    run_task(contact, rank, lambda: [own_files.read(folder, PAYLOAD)], host)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), None)
