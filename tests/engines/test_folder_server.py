"""Files of a job that its controller serves."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfmw.cluster import sockets
from tfmw.cluster.wire import NotAMember
from tfmw.errors import UsageError
from tfmw.launcher.engines import folder_server
from tfmw.launcher.engines.folder_server import FolderClient, FolderServer
from tfmw.launcher.remote.links import SealedConnection
from tfmw.launcher.remote.messages import End, encode


@pytest.fixture
def address(tmp_path: Path) -> Iterator[tuple[str, int]]:
    listener = sockets.listen("127.0.0.1")
    server = FolderServer(listener, b"token", tmp_path)
    tmp_path.chmod(0o700)
    yield listener.getsockname()
    server.close()


@contextlib.contextmanager
def connected(address: tuple[str, int], token: bytes = b"token") -> Iterator[FolderClient]:
    with contextlib.closing(
        FolderClient(token, lambda: socket.create_connection(address, 10))
    ) as files:
        yield files


def test_files_are_read_and_written(
    address: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of several pieces arrives as `call.receive` expects it: its parts are aligned."""
    monkeypatch.setattr(folder_server, "PIECE", 1000)
    with connected(address) as files:
        assert files.read("status.json") == b""
        files.write("status.json", None, b"{}")
        assert files.read("status.json") == b"{}"
        parts = [bytes([1]) * 100, bytes([2]) * 2500, bytes([3]) * 7]
        files.upload("payload", parts)
        data = (tmp_path / "payload").read_bytes()
        assert data == b"".join(part + bytes(-len(part) % 64) for part in parts)
        assert files.read("payload") == data
        assert files.read("payload", 2000) == data[2000:]
        assert (tmp_path / "payload").stat().st_mode & 0o077 == 0


def test_only_who_knows_the_token_is_served(address: tuple[str, int], tmp_path: Path) -> None:
    with connected(address, b"other") as files, pytest.raises((NotAMember, ConnectionError)):
        files.write("cancel", None, b"")
    assert not (tmp_path / "cancel").exists()


def test_files_of_other_folders_are_refused(address: tuple[str, int], tmp_path: Path) -> None:
    secret = tmp_path.with_name(f"{tmp_path.name}-secret")
    secret.write_text("secret")
    (tmp_path / "link").symlink_to(secret)
    with connected(address) as files:
        for name in (f"../{secret.name}", str(secret), "..", ""):
            with pytest.raises(UsageError, match="expected one without a directory"):
                files.read(name)
        with pytest.raises(UsageError, match="cannot be opened"):
            files.read("link")
        with pytest.raises(UsageError, match="link"):
            files.write("link", 0, b"overwritten")
        assert files.read("absent") == b"", "the connection is still good"
    assert secret.read_text() == "secret"


@pytest.mark.parametrize("data", [b"null", b'{"is": "FileRequest"}', encode(End(0))])
def test_another_message_ends_the_connection(address: tuple[str, int], data: bytes) -> None:
    with socket.create_connection(address, 10) as peer:
        client = SealedConnection(peer, b"token", "client", "server")
        client.send(data)
        with pytest.raises(ConnectionAbortedError):
            client.receive()
    with connected(address) as files:
        assert files.read("absent") == b"", "others are served"


def test_lost_connection_is_opened_again(address: tuple[str, int]) -> None:
    with connected(address) as files:
        files.write("a", None, b"1")
        assert files._server is not None
        files._server.peer.shutdown(socket.SHUT_RDWR)
        with pytest.raises(BrokenPipeError):
            files.read("a")
        assert files.read("a") == b"1"
