"""A client of etcd's JSON gateway: keys, leases and the transactions that a lock needs.

    client = Client("etcd://h0:2379,h1:2379/tfmw/run7")
    lease = client.grant(ttl_s=10)
    client.create("tfmw/run7/lock", "h0", lease)      # the key's revision; None: it exists
    client.put_if("tfmw/run7/record", "...", "tfmw/run7/lock", revision)

"etcds://..." is the same over TLS. etcdctl's variables hold the user, ETCDCTL_USER=name:password,
and the files of certificates: ETCDCTL_CACERT, and ETCDCTL_CERT with ETCDCTL_KEY of this client.

Every etcd since 3.4 serves this interface on its client port. Standard library only: tasks read
their fence with it, too.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

SCHEMES = ("etcd://", "etcds://")

_TIMEOUT_S = 2.0  # for one request to one member
_UNAUTHORIZED = 401  # an expired token, too


def hosts_of(url: str) -> str:
    """The part before the key in "etcd://host:2379,host:2379/key"."""
    return url.partition("://")[2].partition("/")[0]


def key_of(url: str) -> str:
    """The part after the hosts in "etcd://host:2379/key"."""
    return url.partition("://")[2].partition("/")[2].strip("/") or "tfmw"


def with_key(url: str, key: str) -> str:
    """The same hosts with another key."""
    return f"{url.partition('://')[0]}://{hosts_of(url)}/{key}"


class Client:
    """Talks to the first of several members that responds.

    Args:
        url: "etcd://host:2379,host:2379/key"; with "etcds://", they speak TLS.
        environ: has etcdctl's variables.

    Raises:
        OSError: a file of certificates cannot be read.
    """

    def __init__(self, url: str, environ: Mapping[str, str] = os.environ) -> None:
        self._endpoints = hosts_of(url).split(",")
        self._scheme = "https" if url.startswith("etcds") else "http"
        self._user, _, self._password = environ.get("ETCDCTL_USER", "").partition(":")
        self._token = ""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self._scheme == "https":
            context = ssl.create_default_context(cafile=environ.get("ETCDCTL_CACERT"))
            if own := environ.get("ETCDCTL_CERT"):
                context.load_cert_chain(own, environ.get("ETCDCTL_KEY"))
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, key: str) -> str | None:
        """A key's value; None where there is no such key."""
        found = self.look(key)
        return found[0] if found else None

    def look(self, key: str) -> tuple[str, int] | None:
        """A key's value and the revision of its creation; None where there is no such key."""
        found = self._call("kv/range", {"key": _packed(key)}).get("kvs")
        if not found:
            return None
        value = base64.b64decode(found[0]["value"]).decode()
        return value, int(found[0]["create_revision"])

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
        return self.put_if(key, value, key, 0, lease)

    def put_if(self, key: str, value: str, lock: str, revision: int, lease: int = 0) -> int | None:
        """Writes a key if the creation of `lock` has this revision, 0 for no such key.

        Returns:
            The revision of the write; None if the lock has another one.
        """
        condition = {"key": _packed(lock), "target": "CREATE", "createRevision": str(revision)}
        put = {"key": _packed(key), "value": _packed(value), "lease": str(lease)}
        found = self._call("kv/txn", {"compare": [condition], "success": [{"requestPut": put}]})
        return int(found["header"]["revision"]) if found.get("succeeded") else None

    def _call(self, method: str, request: Mapping[str, Any]) -> dict[str, Any]:
        problem: Exception | None = None
        for endpoint in list(self._endpoints):
            try:
                if self._user and not self._token:
                    self._authenticate(endpoint)
                try:
                    return self._post(endpoint, method, request)
                except urllib.error.HTTPError as error:
                    if error.code != _UNAUTHORIZED or not self._user:
                        raise
                    self._authenticate(endpoint)
                    return self._post(endpoint, method, request)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = error
                # The next request begins with another one.
                self._endpoints = [*self._endpoints[1:], self._endpoints[0]]
        raise OSError(f"etcd at {', '.join(self._endpoints)}: {_text(problem)}") from problem

    def _authenticate(self, endpoint: str) -> None:
        self._token = ""
        request = {"name": self._user, "password": self._password}
        self._token = self._post(endpoint, "auth/authenticate", request)["token"]

    def _post(self, endpoint: str, method: str, request: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        url, data = f"{self._scheme}://{endpoint}/v3/{method}", json.dumps(request).encode()
        body = urllib.request.Request(url, data, headers)
        with self._opener.open(body, timeout=_TIMEOUT_S) as response:
            found: dict[str, Any] = json.loads(response.readline(1 << 20))
            return found


def _text(problem: Exception | None) -> str:
    """An error in words; of an HTTP status, those of etcd."""
    if isinstance(problem, urllib.error.HTTPError):
        return problem.read(1000).decode("utf-8", "replace").strip() or str(problem)
    return str(problem)


def _packed(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
