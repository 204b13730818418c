"""Connections from the tasks' private network to outside servers, by an HTTP proxy or by port.

    ServedRequest(client, environ)      # CONNECT host:port, or GET http://host/path
    serve_port(client, 5000)            # localhost:5000 of this machine

The launcher accepts on sockets that were created inside the network (see `isolation`) and connects
outside, so names are resolved outside too. These connections use the proxy that the user's
environment names, except for hosts in the user's `no_proxy`.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import ipaddress
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Url = urllib.parse.SplitResult

CONNECT_TIMEOUT_S = 60.0

_BLOCK = 1 << 16  # bytes of a block
# RFC 9110, 7.6.1: fields for the next hop only.
_HOP_BY_HOP = ("connection", "keep-alive", "proxy-connection", "proxy-authorization")


def serve_port(client: socket.socket, port: int) -> None:
    """Connects the client to a server of this machine, until both ends are closed."""
    with socket.create_connection(("localhost", port), CONNECT_TIMEOUT_S) as server:
        server.settimeout(None)
        _relay(client, _blocks(client.recv), server, _blocks(server.recv))


class ServedRequest(http.server.BaseHTTPRequestHandler):
    """The request of one connection, which the constructor reads, connects and completes.

    The constructor of the base class does all of this.
    """

    protocol_version = "HTTP/1.1"
    timeout = CONNECT_TIMEOUT_S  # time for the request line and its headers

    def __init__(self, client: socket.socket, environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(client, ("the private network", 0), None)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Connects to the server, or to the user's proxy for it, and relays both directions."""
        self.close_connection = True
        tunnel = self.command == "CONNECT"
        url = urllib.parse.urlsplit(f"https://{self.path}" if tunnel else self.path)
        if not tunnel and url.scheme != "http":
            self.send_error(501, "expected CONNECT host:port or an http:// address")
            return
        try:
            proxy = upstream(url.scheme, url.hostname or "", self._environ)
            at = url if proxy is None else proxy
            port = at.port or (443 if at.scheme == "https" else 80)
            server = socket.create_connection((at.hostname or "", port), CONNECT_TIMEOUT_S)
        except (OSError, ValueError) as error:
            host = url.netloc.rpartition("@")[2]
            self.send_error(502, f"no connection outside of the private network to {host}: {error}")
            return
        server.settimeout(None)
        self.connection.settimeout(None)
        with server:
            (self._tunnel if tunnel else self._forward)(server, url, proxy)

    do_CONNECT = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET

    def _tunnel(self, server: socket.socket, url: Url, proxy: Url | None) -> None:
        if proxy is None:
            self.send_response_only(200, "Connection established")
            self.end_headers()
        else:  # the client gets its response
            fields = [f"Host: {self.path}", *_authorization(proxy)]
            server.sendall(_head(f"CONNECT {self.path} HTTP/1.1", fields))
        _relay(self.connection, _blocks(self.rfile.read1), server, _blocks(server.recv))

    def _forward(self, server: socket.socket, url: Url, proxy: Url | None) -> None:
        """Forwards a plain request; a connection has one request, so any body may follow."""
        origin = url._replace(scheme="", netloc="", path=url.path or "/", fragment="").geturl()
        fields = [f"{k}: {v}" for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP]
        fields += ["Connection: close", *([] if proxy is None else _authorization(proxy))]
        target = origin if proxy is None else self.path
        server.sendall(_head(f"{self.command} {target} HTTP/1.1", fields))
        if "Transfer-Encoding" in self.headers:
            _relay(self.connection, _blocks(self.rfile.read1), server, _closing(server))
        else:
            body = _body(self.rfile, int(self.headers.get("Content-Length", 0)))
            _relay(self.connection, body, server, _closing(server), half_close=False)

    def handle_expect_100(self) -> bool:
        """Lets the server answer."""
        return True

    def log_message(self, *_: object) -> None:
        pass


def _blocks(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yields all that a function reads, until the end."""
    return iter(lambda: read(_BLOCK), b"")


def _body(reader: Any, length: int) -> Iterator[bytes]:
    """Yields the next `length` bytes of a reader."""
    while length and (data := reader.read1(min(_BLOCK, length))):
        length -= len(data)
        yield data


def _closing(server: socket.socket) -> Iterator[bytes]:
    """Yields a server's response, with a field that says that the connection ends with it.

    Many servers do not send it, although the request asked them to close. The client would send its
    next request while the connection is being closed.
    """
    received = b""
    while (data := server.recv(_BLOCK)) and len(received) <= _BLOCK:
        received += data
        head, end, rest = received.partition(b"\r\n\r\n")
        while end and head[9:10] == b"1":  # 100 Continue: the response follows
            yield head + end
            received = rest
            head, end, rest = received.partition(b"\r\n\r\n")
        if end:
            first, *fields = head.split(b"\r\n")
            names = [field.split(b":")[0].decode("latin-1").lower() for field in fields]
            kept = [f for f, name in zip(fields, names, strict=True) if name not in _HOP_BY_HOP]
            yield b"\r\n".join([first, *kept, b"Connection: close"]) + end + rest
            break
    else:
        yield received + data
    yield from _blocks(server.recv)


def upstream(scheme: str, host: str, environ: Mapping[str, str]) -> Url | None:
    """The user's proxy for a host; None: connect directly.

    Raises:
        ValueError: the proxy does not speak HTTP.
    """

    def variable(name: str) -> str:
        return environ.get(name) or environ.get(name.upper()) or ""

    value = variable(f"{scheme}_proxy") or variable("all_proxy")
    if not value or _matches(host, variable("no_proxy")):
        return None
    proxy = urllib.parse.urlsplit(value if "://" in value else f"http://{value}")
    if proxy.scheme != "http":
        raise ValueError(
            f"{scheme}_proxy or all_proxy names a proxy of {proxy.scheme}://, expected http://; "
            "use --isolate off"
        )
    return proxy


def _matches(host: str, no_proxy: str) -> bool:
    """Whether `no_proxy` names the host: "*", ".example.org, 10.0.0.0/8, localhost"."""
    for entry in no_proxy.lower().replace(" ", "").split(","):
        domain = entry.lstrip(".")
        if entry == "*" or (domain and (host == domain or host.endswith(f".{domain}"))):
            return True
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
    return False


def _authorization(proxy: Url) -> list[str]:
    if proxy.username is None:
        return []
    user, password = (urllib.parse.unquote(part or "") for part in (proxy.username, proxy.password))
    encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
    return [f"Proxy-Authorization: Basic {encoded}"]


def _head(first: str, fields: list[str]) -> bytes:
    return "\r\n".join([first, *fields, "", ""]).encode("latin-1")


def _relay(
    client: socket.socket,
    from_client: Iterable[bytes],
    server: socket.socket,
    from_server: Iterable[bytes],
    half_close: bool = True,
) -> None:
    """Copies in both directions until the server has closed its end, or a connection is lost.

    The client's end of stream is passed on to the server only if `half_close`.
    """
    arguments = from_client, client, server, half_close
    up = threading.Thread(target=_copy, args=arguments, daemon=True)
    up.start()
    _copy(from_server, server, client, True)
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RD)  # a server that has closed reads nothing more
    up.join()


def _copy(
    blocks: Iterable[bytes], source: socket.socket, target: socket.socket, half_close: bool
) -> None:
    try:
        for data in blocks:
            target.sendall(data)
    except OSError:
        for lost in (source, target):
            with contextlib.suppress(OSError):
                lost.shutdown(socket.SHUT_RDWR)
        return
    if half_close:
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
