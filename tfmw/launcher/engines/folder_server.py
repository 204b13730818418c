"""Files of a job whose hosts share no folder: the controller serves them to who knows the token.

    server = FolderServer(listener, token, folder)      # in the controller
    files = FolderClient(token, dial)                   # dial() returns a connected socket
    files.write("payload", 0, data)
    files.read("status.json")

A request and its reply are frames with a MAC (`tfmw.launcher.remote.links`): JSON, then bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tfmw.cluster import wire
from tfmw.errors import UsageError
from tfmw.launcher import call
from tfmw.launcher.engines import own_files
from tfmw.launcher.remote.links import HEADER, Forged, Frames

PIECE = 4 << 20
"""Bytes of a file in one message."""

_LARGEST = PIECE + (1 << 16)  # bytes of one message
_REPLY_S = 30.0  # time for the other side to reply

Dial = Callable[[], socket.socket]


class _Peer:
    """A connection whose other side has proven the token."""

    def __init__(self, peer: socket.socket, token: bytes, own: str, other: str) -> None:
        peer.settimeout(wire.HELLO_S if own == "server" else _REPLY_S)
        session = wire.prove(peer, token, own.encode(), other.encode())
        self._out, self._in = Frames(session, own), Frames(session, other)
        self.peer = peer

    def send(self, head: dict[str, Any], body: bytes | memoryview = b"") -> None:
        self.peer.sendall(self._out.seal(b"\n".join((json.dumps(head).encode(), body))))

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next message. Raises OSError: the connection is lost, or its bytes are forged."""
        length, mac = HEADER.unpack(wire.read(self.peer, HEADER.size))
        if length > _LARGEST:
            raise OSError("the message is too large")
        try:
            head, _, body = self._in.unseal(wire.read(self.peer, length), mac).partition(b"\n")
        except Forged as error:
            raise OSError(str(error)) from error
        return json.loads(head), body


class FolderServer:
    """Serves one folder, each connection in a thread of its own.

    Args:
        listener: a listening socket.
        token: token of the job.
        folder: the folder.
    """

    def __init__(self, listener: socket.socket, token: bytes, folder: Path) -> None:
        self._folder = folder
        self._writing = threading.Lock()
        self._server = wire.Server(
            listener,
            None,
            self._serve,
            "tfmw-files",
            introduce=lambda peer: _Peer(peer, token, "server", "client"),
        )
        self.close = self._server.close

    def _serve(self, peer: _Peer) -> None:
        peer.peer.settimeout(None)
        with contextlib.closing(peer.peer), contextlib.suppress(OSError):
            while True:
                request, body = peer.receive()
                data, problem = b"", {}
                try:
                    data = self._reply(body, **request)
                except (UsageError, OSError) as error:
                    problem = {"error": str(error)}
                peer.send(problem, data)

    def _reply(self, body: bytes, name: str, offset: int | None, write: bool) -> bytes:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise UsageError(f"received the file name {name!r}: expected one without a directory.")
        if not write:
            return own_files.read(self._folder, name, offset or 0, PIECE)
        with self._writing:
            if offset is None:
                own_files.write(self._folder / name, body)
                return b""
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(self._folder / name, flags, 0o600), "wb") as file:
                file.seek(offset)
                file.write(body)
        return b""


class FolderClient:
    """Files of a served folder; connects when needed, and again after a connection was lost.

    Args:
        token: token of the job.
        dial: connects to the server. Raises OSError.
    """

    def __init__(self, token: bytes, dial: Dial) -> None:
        self._token, self._dial = token, dial
        self._peer: _Peer | None = None
        self._asking = threading.Lock()

    def __del__(self) -> None:
        self.close()

    def read(self, name: str, offset: int = 0) -> bytes:
        """A file from `offset` on; b"" if there is none. Raises OSError."""
        found = bytearray()
        while True:
            piece = self._ask(name=name, offset=offset + len(found), write=False)
            found += piece
            if len(piece) < PIECE:  # another read could be of a file that has been replaced
                return bytes(found)

    def write(self, name: str, offset: int | None, data: bytes | memoryview) -> None:
        """Writes into a file at `offset`; None: replaces the file atomically. Raises OSError."""
        self._ask(data, name=name, offset=offset, write=True)

    def upload(self, name: str, payload: call.Payload) -> None:
        """Writes a packed call. Raises OSError."""
        with tempfile.TemporaryFile() as file:
            call.write(payload, file)
            file.seek(0)
            self._pieces(name, file)

    def replace(self, name: str, data: bytes | memoryview) -> None:
        """Writes a file; one that fits into a message is replaced atomically. Raises OSError."""
        if len(data) < PIECE:
            self.write(name, None, data)
        else:
            self._pieces(name, io.BytesIO(data))

    def _pieces(self, name: str, file: IO[bytes]) -> None:
        while piece := file.read(PIECE):
            self.write(name, file.tell() - len(piece), piece)

    def close(self) -> None:
        """Closes the connection; the next request opens another one."""
        if self._peer is not None:
            self._peer.peer.close()
            self._peer = None

    def _ask(self, body: bytes | memoryview = b"", **request: Any) -> bytes:
        with self._asking:
            try:
                if self._peer is None:
                    self._peer = _Peer(self._dial(), self._token, "client", "server")
                self._peer.send(request, body)
                reply, data = self._peer.receive()
            except OSError:
                self.close()
                raise
        if "error" in reply:
            raise UsageError(reply["error"])
        return data
