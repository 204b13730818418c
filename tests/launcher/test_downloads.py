"""Tasks in a private network download from servers outside; nobody connects to their ports."""

from __future__ import annotations

import base64
import contextlib
import http.client
import http.server
import itertools
import json
import os
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cases import each
from tests.helpers.certificates import certificate
from tests.helpers.cluster import ClusterRun
from tfmw.launcher import network, proxy
from tfmw.launcher.network import Gateway

CONTENT = "what is outside"


class Outside(http.server.BaseHTTPRequestHandler):
    """A server of files, of MLflow, of a git repository, and of Google's storage."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urllib.parse.urlsplit(self.path).path
        if path.startswith("/connect/"):
            return self.answer(self.connect(int(path.removeprefix("/connect/"))))
        if path == "/repository/info/refs":
            return self.answer(f"{'0' * 39}1\trefs/heads/main\n")
        if path.startswith("/storage/v1/b/bucket/o/"):
            stat = {"size": str(len(CONTENT)), "generation": "1"}
            return self.answer(json.dumps(stat | {"updated": "2020-01-01T00:00:00.000Z"}))
        return self.answer(CONTENT)

    def do_POST(self) -> None:
        if "Content-Length" in self.headers:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        else:
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
        mlflow = self.path.endswith("/experiments/search")
        found = json.dumps({"experiments": [{"name": "outside", "experiment_id": "1"}]})
        self.answer(found if mlflow else body.decode())

    def answer(self, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def connect(self, port: int) -> str:
        """Whether this machine reaches a port, at loopback or at its address in the network."""
        for host in {"127.0.0.1", self.connection.getsockname()[0]}:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((host, port), 10).close()
                return f"{host} accepts"
        return "refused"

    def log_message(self, *_: object) -> None:
        pass


class UsersProxy(http.server.BaseHTTPRequestHandler):
    """A proxy that leads every host to one server."""

    https_port = 0
    asked: set[tuple[str, str, str]]

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        self.asked.add((self.command, self.path, self.headers["Proxy-Authorization"]))
        return parsed

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"by the proxy")

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        proxy.serve_port(self.connection, self.https_port)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(
    handler: Any, host: str = "127.0.0.1", port: int = 0, context: ssl.SSLContext | None = None
) -> Iterator[int]:
    """Serves until the end of the `with`; yields the port."""
    with http.server.ThreadingHTTPServer((host, port), handler) as server:
        server.daemon_threads = True
        if context is not None:
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def own_address() -> str:
    """This machine's address in its network; one that is not in `no_proxy` without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        try:
            udp.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.2"
        return str(udp.getsockname()[0])


# ---- a run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def downloads(run_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(the run, requests that the user's proxy got)."""
    address = own_address()
    google = ("www.googleapis.com", "storage.googleapis.com", "oauth2.googleapis.com")
    cert = str(certificate(tmp_path_factory.mktemp("cert"), address, "data.example", *google))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(serving(Outside, address))
        tls = stack.enter_context(serving(Outside, address, context=context))
        any_host = stack.enter_context(serving(Outside, context=context))
        local = _serve_below_the_system_s(stack)
        asked: set[tuple[str, str, str]] = set()
        users = type("Handler", (UsersProxy,), {"asked": asked, "https_port": any_host})
        proxy_url = f"http://me:pass%20word@127.0.0.1:{stack.enter_context(serving(users))}"
        authorities = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
        run = run_cluster(
            "downloads.py",
            f"http://{address}:{plain}",
            f"https://{address}:{tls}",
            str(local),
            options=["--isolate", "on"],
            env={
                **dict.fromkeys(authorities, cert),
                "http_proxy": proxy_url,
                "HTTPS_PROXY": proxy_url,
                "no_proxy": f"{address}, .invalid",
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            },
        )
    return run, asked


def _serve_below_the_system_s(stack: contextlib.ExitStack) -> int:
    """A server at a port that the system gives to nobody by itself, as users' servers have."""
    for port in itertools.count(20_000):
        with contextlib.suppress(OSError):
            return stack.enter_context(serving(Outside, port=port))
    raise AssertionError("unreachable")


@pytest.mark.process
class TestRun:
    @pytest.mark.parametrize("program", ["urllib", "requests", "tfds"])
    @pytest.mark.parametrize("scheme", ["http", "https"])
    def test_downloads_come(self, downloads, program, scheme):
        for task in each(downloads[0]):
            assert task[f"{program} {scheme}"] == CONTENT

    @pytest.mark.parametrize("scheme", ["http", "https"])
    def test_uploads_on_one_connection(self, downloads, scheme):
        assert [task[f"post {scheme}"] for task in downloads[0]] == [[1, 10**6]] * 2

    def test_mlflow_and_git(self, downloads):
        for task in each(downloads[0]):
            assert task["mlflow"] == ["outside"]
            assert "refs/heads/main" in task["git"]

    def test_gs_and_names_by_the_user_s_proxy(self, downloads):
        """Google's names resolve only at the user's proxy here."""
        run, asked = downloads
        authorization = "Basic " + base64.b64encode(b"me:pass word").decode()
        for task in run:
            assert task["gs"] == CONTENT
            assert task["by the user's proxy"] == ["by the proxy", CONTENT]
        assert ("GET", "http://data.example/file", authorization) in asked
        assert ("CONNECT", "data.example:443", authorization) in asked
        assert ("CONNECT", "storage.googleapis.com:443", authorization) in asked

    def test_no_proxy_of_the_user(self, downloads):
        hosts = {urllib.parse.urlsplit(f"//{path}").hostname for _, path, _ in downloads[1]}
        assert own_address() not in hosts

    def test_servers_of_this_machine_at_localhost(self, downloads):
        assert [task["localhost"] for task in downloads[0]] == [CONTENT] * 2

    def test_unknown_host_is_an_error_with_its_name(self, downloads):
        for task in each(downloads[0]):
            assert (
                "502 no connection outside of the private network to nobody.inv" in task["nobody"]
            )

    def test_ports_refuse(self, downloads):
        run: ClusterRun = downloads[0]
        assert run[0]["namespace"] != os.readlink("/proc/self/ns/net")
        assert set(run[0]["ports"].values()) == {"refused"}
        assert len(run[0]["ports"]) == 4

    def test_workers_sum_past_the_proxy(self, downloads):
        assert [task["sum"] for task in downloads[0]] == [2.0, 2.0]

    def test_nothing_is_printed(self, downloads):
        assert "private network" not in downloads[0].output


# ---- the gateway alone --------------------------------------------------------------------------


@pytest.fixture
def gateway() -> Iterator[int]:
    """The port of a gateway's proxy, in this machine's network."""
    with socket.create_server(("127.0.0.1", 0)) as listener, Gateway([listener], {}):
        yield listener.getsockname()[1]


class TestGateway:
    @pytest.mark.parametrize("chunked", [False, True])
    def test_a_body_arrives_whole(self, gateway, chunked):
        with serving(Outside) as port:
            connection = http.client.HTTPConnection("127.0.0.1", gateway, timeout=10)
            parts = [b"0123456789" * 10**5, b"end"]
            body = iter(parts) if chunked else b"".join(parts)
            connection.request(
                "POST", f"http://127.0.0.1:{port}/echo", body, encode_chunked=chunked
            )
            response = connection.getresponse()
            assert response.read() == b"".join(parts)
            assert response.status == 200
            # The server did not say that it closes: clients must not send their next request here.
            assert response.getheader("Connection") == "close"
            connection.close()

    def test_a_response_follows_an_informational_one(self, gateway):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", gateway), 10) as client:
                client.sendall(f"GET http://127.0.0.1:{port}/ HTTP/1.1\r\n\r\n".encode())
                accepted, _ = server.accept()
                with accepted:
                    accepted.sendall(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
                    accepted.sendall(b"Keep-Alive: timeout=5\r\nServer: s\r\n\r\nbody")
                with client.makefile("rb") as received:
                    assert received.read() == (
                        b"HTTP/1.1 100 Continue\r\n\r\n"
                        b"HTTP/1.1 200 OK\r\nServer: s\r\nConnection: close\r\n\r\nbody"
                    )

    def test_a_tunnel_passes_on_the_end_of_each_direction(self, gateway):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", gateway), 10) as client:
                client.sendall(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode() + b"early")
                client.shutdown(socket.SHUT_WR)
                accepted, _ = server.accept()
                with accepted, accepted.makefile("rb") as received:
                    assert received.read() == b"early"
                    accepted.sendall(b"late")
                with client.makefile("rb") as received:
                    assert received.read().endswith(b"\r\n\r\nlate")

    @pytest.mark.parametrize(
        ("request_line", "status"),
        [
            ("GET /file HTTP/1.1", 501),
            ("GET ftp://127.0.0.1/file HTTP/1.1", 501),
            ("CONNECT 127.0.0.1:port HTTP/1.1", 502),
            ("CONNECT nobody.invalid:1 HTTP/1.1", 502),
            ("BREW http://127.0.0.1/ HTTP/1.1", 501),
        ],
    )
    def test_wrong_requests_get_an_answer(self, gateway, request_line, status):
        with socket.create_connection(("127.0.0.1", gateway), 10) as client:
            client.sendall(f"{request_line}\r\n\r\n".encode())
            with client.makefile("rb") as received:
                assert int(received.readline().split()[1]) == status

    def test_connections_are_bounded(self, gateway, monkeypatch):
        monkeypatch.setattr(network, "MAX_CONNECTIONS", 1)
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(("127.0.0.1", gateway), 10) as first,
        ):
            at = f"127.0.0.1:{server.getsockname()[1]}"
            first.sendall(f"CONNECT {at} HTTP/1.1\r\n\r\n".encode())
            with first.makefile("rb") as received, server.accept()[0] as accepted:
                assert received.readline().split()[1] == b"200"
                with socket.create_connection(("127.0.0.1", gateway), 10) as second:
                    assert second.recv(1) == b""
                accepted.sendall(b"still here")
                accepted.shutdown(socket.SHUT_WR)
                assert received.read().endswith(b"still here")

    def test_connections_end_with_it(self):
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_server(("127.0.0.1", 0)) as listener,
        ):
            with Gateway([listener], {}):
                client = socket.create_connection(listener.getsockname(), 10)
                client.sendall(
                    f"CONNECT 127.0.0.1:{server.getsockname()[1]} HTTP/1.1\r\n\r\n".encode()
                )
                accepted, _ = server.accept()
                accepted.settimeout(10)
                assert client.recv(9) == b"HTTP/1.1 "
            with client, client.makefile("rb") as received, accepted:
                received.read()
                assert accepted.recv(1) == b""


@pytest.mark.parametrize(
    ("scheme", "host", "environ", "expected"),
    [
        ("http", "a.example", {}, None),
        ("http", "a.example", {"HTTP_PROXY": "proxy:80"}, "http://proxy:80"),
        ("http", "a.example", {"http_proxy": "http://p:1", "HTTP_PROXY": "q:2"}, "http://p:1"),
        ("https", "a.example", {"http_proxy": "proxy:80"}, None),
        ("https", "a.example", {"http_proxy": "p:1", "all_proxy": "http://q:2"}, "http://q:2"),
        ("http", "a.example", {"http_proxy": "p:1", "no_proxy": "b.example, .example"}, None),
        ("http", "a.example", {"http_proxy": "p:1", "no_proxy": "A.Example"}, None),
        ("http", "ba.example", {"http_proxy": "p:1", "no_proxy": "a.example"}, "http://p:1"),
        ("http", "a.example", {"http_proxy": "p:1", "NO_PROXY": "*"}, None),
        ("http", "10.1.2.3", {"http_proxy": "p:1", "no_proxy": "10.0.0.0/8"}, None),
        ("http", "11.1.2.3", {"http_proxy": "p:1", "no_proxy": "10.0.0.0/8,,"}, "http://p:1"),
    ],
)
def test_proxy_of_the_user(scheme, host, environ, expected):
    found = proxy.upstream(scheme, host, environ)
    assert (found and found.geturl()) == expected


def test_a_proxy_that_speaks_no_http_is_an_error():
    with pytest.raises(ValueError, match=r"socks5://, expected http://; use --isolate off"):
        proxy.upstream("https", "a.example", {"ALL_PROXY": "socks5://p:1"})


def test_ports_of_localhost(tmp_path: Path):
    (tmp_path / "net").mkdir()
    (tmp_path / "sys/net/ipv4").mkdir(parents=True)
    (tmp_path / "sys/net/ipv4/ip_local_port_range").write_text("32768\t60999\n")
    title, rest = "  sl  local_address\n", "0A 00000000:00000000\n"
    remote, remote6 = "00000000:0000", f"{'0' * 32}:0000"
    (tmp_path / "net/tcp").write_text(
        f"{title}"
        f" 0: 0100007F:1388 {remote} {rest}"
        f" 1: 00000000:0016 {remote} {rest}"
        f" 2: 020200C0:1389 {remote} {rest}"  # 192.0.2.2 only
        f" 3: 0100007F:8000 {remote} {rest}"  # 32768, which the system gives away
        f" 4: 0100007F:138A 0100007F:9999 01 00000000:00000000\n"  # a connection
    )
    (tmp_path / "net/tcp6").write_text(
        f"{title} 0: {'0' * 24}01000000:138B {remote6} {rest} 1: {'0' * 32}:138C {remote6} {rest}"
    )
    assert network.local_servers(tmp_path) == [22, 5000, 5003, 5004]
    assert network.local_servers(tmp_path / "none") == []
