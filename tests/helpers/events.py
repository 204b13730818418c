"""A server of events, by which the tasks of a run meet at the moments that matter.

A task asks for URLs: `/add/EVENT`, `/wait/EVENT/COUNT`, and `/wait_briefly/EVENT/COUNT` for what
must not happen. `tests.programs._events` has these calls.
"""

from __future__ import annotations

import collections
import contextlib
import http.server
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote


class Server(http.server.ThreadingHTTPServer):
    """A server of files, and of events that tasks count and await.

    Args:
        bodies: first word of a URL -> its body.
        halfway: first word of a URL -> the event that it adds after half of the body, and the one
            that it then waits for.
    """

    daemon_threads = True

    def __init__(self, bodies: Mapping[str, bytes], halfway: Mapping[str, tuple[str, str]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies, self.halfway = bodies, halfway
        self.counts: collections.Counter[str] = collections.Counter()
        self._changed = threading.Condition()

    def add(self, event: str) -> None:
        with self._changed:
            self.counts[event] += 1
            self._changed.notify_all()

    def wait_for(self, event: str, count: int = 1, seconds: float = 120.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.counts[event] >= count, seconds)


class Handler(http.server.BaseHTTPRequestHandler):
    """One request of a task."""

    server: Server

    def do_GET(self) -> None:
        action, *words = unquote(self.path).strip("/").split("/")
        self.server.add(action)
        body, status = self.server.bodies.get(action, b""), 200
        if action == "add":
            self.server.add(words[0])
        elif action == "wait" and not self.server.wait_for(words[0], int(words[1])):
            status = 504
        elif action == "wait_briefly":
            self.server.wait_for(words[0], int(words[1]), seconds=1.0)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        if action in self.server.halfway:
            added, awaited = self.server.halfway[action]
            self.server.add(added)
            self.server.wait_for(awaited)
        self.wfile.write(body[len(body) // 2 :])

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def running_server(
    bodies: Mapping[str, bytes] | None = None,
    halfway: Mapping[str, tuple[str, str]] | None = None,
) -> Iterator[Server]:
    """A server that runs in a thread."""
    with Server(bodies or {}, halfway or {}) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()
