"""The socket on which a launcher tells its user about the run: `tfmw status`, `tfmw stacks`.

    with Server(board): ...                        # in the launcher, as long as the run is alive
    found = runs()                                 # in another terminal: [Run(...), ...]
    found[0].ask("status")                         # what `Board.status` returns

One socket for each run, in a directory of the user alone (mode 0700), itself of mode 0600. The
server closes connections of other users, and a client does not use a directory that others could
write. The protocol is one line each way: a question, and JSON. A task without a launcher has its
files there instead (`lone`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import threading
from pathlib import Path
from typing import Any

from tfmw.errors import UsageError
from tfmw.launcher.lone import LoneRun
from tfmw.launcher.snapshot import Board

RUNTIME_DIRECTORY = "TFMW_RUNTIME_DIR"
"""Variable: another directory for the sockets."""

_ANSWER_S = 30.0
_SAMPLE_S = 1.0
_QUESTIONS = ("status", "stacks")


def directory(make: bool = False) -> Path:
    """The directory of this user's sockets.

    Args:
        make: whether to create it.

    Raises:
        UsageError: it belongs to somebody else, or others may use it.
    """
    chosen = os.environ.get(RUNTIME_DIRECTORY)
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if chosen:
        path = Path(chosen)
    elif os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        path = Path(runtime, "tfmw")
    else:
        path = Path(f"/tmp/tfmw-{os.getuid()}")
    if make:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        alone = found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
        if not (stat.S_ISDIR(found.st_mode) and alone):
            raise UsageError(
                f"{path} is not a directory of this user alone (mode 0700): remove it, or set "
                f"{RUNTIME_DIRECTORY} to another directory."
            )
    return path


class Server:
    """Answers questions about a run, in a thread. Without a directory there is no socket.

    Args:
        board: what is known of the run.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._path: Path | None = None
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="tfmw-status", daemon=True)

    def __enter__(self) -> Server:
        with contextlib.suppress(OSError, UsageError):
            path = directory(make=True) / f"{os.getpid()}-{self._board.directory.name}"
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            with _short(path) as name:
                self._socket.bind(name)
                os.chmod(name, 0o600)
            self._socket.listen()
            self._socket.settimeout(_SAMPLE_S)
            self._path = path
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._path is not None:
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX) as wakes,
                _short(self._path) as name,
            ):
                wakes.connect(name)  # the thread need not wait for its time-out
            self._path.unlink(missing_ok=True)
        if self._socket is not None:
            if self._thread.is_alive():
                self._thread.join(timeout=2 * _SAMPLE_S)
            self._socket.close()

    def _serve(self) -> None:
        assert self._socket is not None
        while not self._closed.is_set():
            self._board.sample()
            try:
                connection, _ = self._socket.accept()
            except OSError:  # no question within the time
                continue
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_ANSWER_S)
                if _user(connection) == os.getuid():
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        question = connection.recv(100).decode("ascii", "replace").strip()
        if question in _QUESTIONS:
            answer = getattr(self._board, question)()
            connection.sendall(json.dumps(answer).encode() + b"\n")


class Run:
    """A run of this user that is alive.

    Args:
        path: of its socket.
    """

    def __init__(self, path: Path) -> None:
        pid, _, self.name = path.name.partition("-")
        self.pid = int(pid)
        self._path = path

    def ask(self, question: str) -> Any:
        """The answer to "status" or "stacks"; None if the run has ended."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_S)
            try:
                with _short(self._path) as name:
                    connection.connect(name)
            except (ConnectionRefusedError, FileNotFoundError):
                self._path.unlink(missing_ok=True)  # its launcher was killed
                return None
            data = b""
            with contextlib.suppress(ConnectionError):  # it ends at this moment
                connection.sendall(question.encode() + b"\n")
                while piece := connection.recv(1 << 16):
                    data += piece
        return json.loads(data) if data else None


def runs() -> list[Run | LoneRun]:
    """The runs of this user, oldest first.

    Raises:
        UsageError: as in `directory`.
    """
    try:
        paths = sorted(directory().iterdir(), key=lambda path: path.stat().st_mtime)
    except FileNotFoundError:
        return []
    named = [path for path in paths if path.name.partition("-")[0].isdecimal()]
    return [LoneRun(path) if path.is_dir() else Run(path) for path in named]


def _user(connection: socket.socket) -> int:
    """Who is at the other end: SO_PEERCRED of unix(7), pid, uid and gid."""
    credentials = struct.Struct("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return int(credentials.unpack(found)[1])


@contextlib.contextmanager
def _short(path: Path) -> Any:
    """Another name of a path: that of a socket has 107 characters at most."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
