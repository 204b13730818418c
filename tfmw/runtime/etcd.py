"""A client of etcd's JSON gateway: keys, leases and the transactions that a lock needs.

    client = Client.of("etcd://h0:2379,h1:2379/tfmw/run7")
    lease = client.grant(ttl_s=10)
    client.create("tfmw/run7/lock", "h0", lease)      # the key's revision; None: it exists
    client.put_if("tfmw/run7/record", "...", "tfmw/run7/lock", revision)

Every etcd since 3.4 serves this interface on its client port. Standard library only: tasks read
their fence with it, too.
"""

from __future__ import annotations

import base64
import http.client
import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

SCHEME = "etcd://"
DEFAULT_PREFIX = "tfmw"

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def key_of(url: str) -> str:
    """What follows the hosts in "etcd://host:2379/key"."""
    return url.removeprefix(SCHEME).partition("/")[2].strip("/") or DEFAULT_PREFIX


class Client:
    """Talks to the first of several members that responds.

    Args:
        endpoints: "host:port" of each.
        timeout_s: seconds for one request to one of them.
    """

    def __init__(self, endpoints: Sequence[str], timeout_s: float = 2.0) -> None:
        self._endpoints = list(endpoints)
        self._timeout_s = timeout_s

    @classmethod
    def of(cls, url: str) -> Client:
        """The client of "etcd://host:2379,host:2379/key"."""
        return cls(url.removeprefix(SCHEME).partition("/")[0].split(","))

    def get(self, key: str) -> str | None:
        """A key's value; None where there is no such key."""
        found = self.look(key)
        return found[0] if found else None

    def look(self, key: str) -> tuple[str, int] | None:
        """A key's value and the revision of its creation; None where there is no such key."""
        found = self._call("kv/range", {"key": _packed(key)}).get("kvs")
        if not found:
            return None
        return _unpacked(found[0]["value"]), int(found[0]["create_revision"])

    def grant(self, ttl_s: int) -> int:
        """A new lease that ends after `ttl_s` seconds unless it is kept alive."""
        return int(self._call("lease/grant", {"TTL": ttl_s})["ID"])

    def keep_alive(self, lease: int) -> bool:
        """Starts the lease's time anew; False where it has ended."""
        found = self._call("lease/keepalive", {"ID": lease}).get("result", {})
        return int(found.get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        """Ends a lease, and removes its keys."""
        self._call("lease/revoke", {"ID": lease})

    def create(self, key: str, value: str, lease: int = 0) -> int | None:
        """Writes a key that does not exist yet.

        Returns:
            The revision of its creation; None where it existed.
        """
        found = self._call(
            "kv/txn",
            {
                "compare": [{"key": _packed(key), "target": "CREATE", "createRevision": "0"}],
                "success": [
                    {
                        "requestPut": {
                            "key": _packed(key),
                            "value": _packed(value),
                            "lease": str(lease),
                        }
                    }
                ],
            },
        )
        return int(found["header"]["revision"]) if found.get("succeeded") else None

    def put_if(self, key: str, value: str, lock: str, revision: int) -> bool:
        """Writes a key if another key is the one that `create` made; whether it was."""
        found = self._call(
            "kv/txn",
            {
                "compare": [
                    {"key": _packed(lock), "target": "CREATE", "createRevision": str(revision)}
                ],
                "success": [{"requestPut": {"key": _packed(key), "value": _packed(value)}}],
            },
        )
        return bool(found.get("succeeded"))

    def _call(self, method: str, request: Mapping[str, Any]) -> dict[str, Any]:
        problem: Exception | None = None
        for endpoint in list(self._endpoints):
            body = urllib.request.Request(
                f"http://{endpoint}/v3/{method}",
                json.dumps(request).encode(),
                {"Content-Type": "application/json"},
            )
            try:
                with _NO_PROXY.open(body, timeout=self._timeout_s) as response:
                    found: dict[str, Any] = json.loads(response.readline(1 << 20))
                    return found
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = error
                # The next request begins with another one.
                self._endpoints = [*self._endpoints[1:], self._endpoints[0]]
        raise OSError(f"etcd at {', '.join(self._endpoints)}: {problem}") from problem


def _packed(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _unpacked(text: str) -> str:
    return base64.b64decode(text).decode()
