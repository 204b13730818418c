"""Files of a job whose hosts share no folder: the controller serves them to who knows the token.

    server = FolderServer(listener, token, folder)      # in the controller
    files = FolderClient(token, dial)                   # dial() returns a connected socket
    files.write("payload", 0, data)
    files.read("status.json")

A request and its reply are messages over a `tfmw.launcher.remote.links.SealedConnection`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from tfmw.cluster import wire
from tfmw.errors import UsageError
from tfmw.launcher import call
from tfmw.launcher.engines import own_files
from tfmw.launcher.remote.links import SealedConnection
from tfmw.launcher.remote.messages import FileReply, FileRequest, Malformed, decode, encode

PIECE = 4 << 20
"""Bytes of a file in one message."""

_REPLY_S = 30.0  # time for the other side to reply


class FolderServer:
    """Serves one folder, each connection in a thread of its own.

    Args:
        listener: a listening socket.
        token: token of the job.
        folder: the folder.
    """

    def __init__(self, listener: socket.socket, token: bytes, folder: Path) -> None:
        self._folder, self._token = folder, token
        self._server = wire.Server(listener, None, self._serve, "tfmw-files", self._proven)
        self.close = self._server.close

    def _proven(self, peer: socket.socket) -> SealedConnection:
        peer.settimeout(wire.HELLO_S)
        return SealedConnection(peer, self._token, "server", "client")

    def _serve(self, client: SealedConnection) -> None:
        client.peer.settimeout(None)
        with contextlib.closing(client.peer), contextlib.suppress(OSError, Malformed):
            while isinstance(request := decode(client.receive()), FileRequest):
                try:
                    reply = FileReply(body=self._reply(request))
                except (UsageError, OSError) as error:
                    reply = FileReply(str(error))
                client.send(encode(reply))

    def _reply(self, request: FileRequest) -> bytes:
        name, offset = request.name, request.offset
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise UsageError(f"received the file name {name!r}: expected one without a directory.")
        if not request.write:
            return own_files.read(self._folder, name, offset or 0, PIECE)
        if offset is None:
            own_files.write(self._folder / name, request.body)
            return b""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self._folder / name, flags, 0o600), "wb") as file:
            file.seek(offset)
            file.write(request.body)
        return b""


class FolderClient:
    """Files of a served folder; connects when needed, and again after a connection was lost.

    Args:
        token: token of the job.
        dial: connects to the server. Raises OSError.
    """

    def __init__(self, token: bytes, dial: Callable[[], socket.socket]) -> None:
        self._token, self._dial = token, dial
        self._server: SealedConnection | None = None
        self._asking = threading.Lock()

    def __del__(self) -> None:
        self.close()

    def read(self, name: str, offset: int = 0) -> bytes:
        """A file from `offset` on; b"" if there is none. Raises OSError."""
        found = bytearray()
        while True:
            piece = self._ask(FileRequest(name, offset + len(found), write=False))
            found += piece
            if len(piece) < PIECE:  # another read could be of a file that has been replaced
                return bytes(found)

    def write(self, name: str, offset: int | None, data: bytes | memoryview) -> None:
        """Writes into a file at `offset`; None: replaces the file atomically. Raises OSError."""
        self._ask(FileRequest(name, offset, write=True, body=bytes(data)))

    def upload(self, name: str, payload: call.Payload) -> None:
        """Writes a packed call. Raises OSError."""
        with tempfile.TemporaryFile() as file:
            call.write(payload, file)
            file.seek(0)
            while piece := file.read(PIECE):
                self.write(name, file.tell() - len(piece), piece)

    def close(self) -> None:
        """Closes the connection; the next request opens another one."""
        if self._server is not None:
            self._server.peer.close()
            self._server = None

    def _ask(self, request: FileRequest) -> bytes:
        with self._asking:
            try:
                if self._server is None:
                    peer = self._dial()
                    peer.settimeout(_REPLY_S)
                    self._server = SealedConnection(peer, self._token, "client", "server")
                self._server.send(encode(request))
                reply = decode(self._server.receive())
            except OSError:
                self.close()
                raise
        assert isinstance(reply, FileReply)
        if reply.error:
            raise UsageError(reply.error)
        return reply.body
