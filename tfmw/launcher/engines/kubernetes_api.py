"""Requests to the API server of a Kubernetes cluster, by the official client.

    api = Api.connected(context="", namespace="")
    api.create("Jobs", job)
    api.listed("pods", "job-name=tfmw-3fa9c2")

Objects are plain JSON. A request is repeated for a while if the server is busy or away; then
`Unreachable` is raised. Requests that the server refuses raise UsageError with its message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfmw.errors import TfmwError, UsageError
from tfmw.launcher.engines import kubernetes_objects as objects
from tfmw.launcher.engines.engine import library
from tfmw.launcher.engines.kubernetes_objects import Object

_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_METHODS = {"create": "POST", "delete": "DELETE"}
_LATER = (408, 429, 500, 502, 503, 504)  # statuses after which a request is repeated
_REPLY_S = 15.0  # time for one reply
_RETRY_S = 0.5
_BLOCKED_S = 60.0  # time for which a pod may have an error, such as a failed pull of its image


class Unreachable(TfmwError, ConnectionError):
    """Error for an API server that does not reply, or is too busy."""


@dataclasses.dataclass(frozen=True)
class Api:
    """The API of one namespace."""

    kubernetes: Any  # the module
    client: Any  # an ApiClient
    namespace: str
    patience_s: float  # time for which a request is repeated

    @classmethod
    def connected(cls, context: str = "", namespace: str = "", patience_s: float = 10.0) -> Api:
        """The API of the kubeconfig's context, or of the cluster of this pod.

        Raises:
            UsageError: there is neither, or the package is not installed.
        """
        file = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        changed = os.stat(file).st_mtime_ns if os.path.exists(file) else 0
        return cls._of(file, changed, context, namespace, patience_s)

    @classmethod
    @functools.lru_cache(8)  # connections are used again, unless the kubeconfig has changed
    def _of(cls, file: str, changed: int, context: str, namespace: str, patience_s: float) -> Api:
        kubernetes = library("kubernetes")
        config, settings = kubernetes.config, kubernetes.client.Configuration()
        settings.retries = False  # urllib3 would log a warning for each
        try:
            if not changed and _POD_NAMESPACE.exists():
                config.load_incluster_config(client_configuration=settings)
                own = _POD_NAMESPACE.read_text().strip()
            else:
                named = {"config_file": file, "context": context or None}
                config.load_kube_config(**named, client_configuration=settings)
                contexts, current = config.list_kube_config_contexts(file)
                chosen = next((c for c in contexts if c["name"] == context), current)
                own = chosen["context"].get("namespace", "default")
        except (config.ConfigException, OSError) as error:
            raise UsageError(
                f"on='kubernetes' has no cluster ({error}): call tfmw where kubectl works, or in a "
                "pod, or name the file by KUBECONFIG."
            ) from error
        client = kubernetes.client.ApiClient(settings)
        return cls(kubernetes, client, namespace or own, patience_s)

    def create(self, kind: str, content: Object) -> Object:
        """Creates an object; the existing one if a request whose reply was lost has created it."""
        made: Object | None = self._call("create", kind, body=content, unless=409)
        return made or self._call("read", kind, content["metadata"]["name"])

    def get(self, kind: str, name: str) -> Object | None:
        """An object; None if there is none."""
        return self._call("read", kind, name, unless=404)

    def listed(self, kind: str, labels: str) -> list[Object]:
        """The objects with these labels, the oldest first."""
        found = self._call("list", kind, query={"labelSelector": labels})["items"]
        return sorted(found, key=lambda each: str(each["metadata"].get("creationTimestamp")))

    def delete(self, kind: str, name: str) -> None:
        """Deletes an object, and what it owns."""
        self._call("delete", kind, name, query={"propagationPolicy": "Background"}, unless=404)

    def events(self, name: str) -> list[str]:
        """The messages of an object's events; none if they may not be read."""
        with contextlib.suppress(UsageError, Unreachable):
            about = {"fieldSelector": f"involvedObject.name={name}"}
            found = self._call("list", "events", query=about)["items"]
            return [event["message"] for event in found if "message" in event]
        return []

    def version(self) -> tuple[int, int]:
        """Major and minor version of the server."""
        found = self._call("read", "version")
        return int(found["major"]), int(found["minor"].rstrip("+"))

    def forwarded(self, pod: str, port: int) -> socket.socket:
        """A connection to a port of a pod, through the API server. Raises OSError."""
        # The client replaces a method of this object for the time of the call.
        client = self.kubernetes.client
        core = client.CoreV1Api(client.ApiClient(self.client.configuration))
        connect = core.connect_get_namespaced_pod_portforward
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def forward() -> None:
            try:
                request = self.kubernetes.stream.portforward
                replies.put(request(connect, pod, self.namespace, ports=str(port)).socket(port))
            except client.ApiException as error:
                replies.put(ConnectionError(f"no port of {pod} is forwarded: {error.reason}"))

        # The client's request has no time limit.
        threading.Thread(target=forward, name="tfmw-forward", daemon=True).start()
        try:
            found: socket.socket | OSError = replies.get(timeout=_REPLY_S)
        except queue.Empty:
            found = TimeoutError(f"no port of {pod} is forwarded within {_REPLY_S:g} s")
        if isinstance(found, OSError):
            raise found
        return found

    def _call(
        self,
        verb: str,
        kind: str,
        name: str = "",
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        unless: int = 0,
    ) -> Any:
        """The reply to a request, as JSON; None if the server refuses it with status `unless`."""
        from urllib3.exceptions import HTTPError

        group = "/apis/batch/v1" if kind == "Jobs" else "/api/v1"
        path = f"{group}/namespaces/{self.namespace}/{kind.lower()}" + (name and f"/{name}")
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                return self.client.call_api(
                    "/version/" if kind == "version" else path,
                    _METHODS.get(verb, "GET"),
                    query_params=list((query or {}).items()),
                    header_params={"Accept": "application/json"},
                    body=body,
                    response_type="object",
                    auth_settings=["BearerToken"],
                    _return_http_data_only=True,
                    _request_timeout=_REPLY_S,
                )
            except self.kubernetes.client.ApiException as error:
                if error.status == unless:
                    return None
                if error.status not in _LATER:
                    raise UsageError(
                        f"Kubernetes refuses to {verb} {kind} in the namespace {self.namespace} "
                        f"({error.status}): {_message(error)}"
                    ) from error
                problem = f"{error.status} {error.reason}"
            except HTTPError as error:
                problem = str(error)
            if time.monotonic() > deadline:
                raise Unreachable(f"the API server of Kubernetes does not reply ({problem})")
            time.sleep(_RETRY_S)


class Pods:
    """The pods of a Job, by completion index, as of the last look; a single pod has index -1."""

    def __init__(self, api: Api, job: str) -> None:
        self.found: dict[int, Object] = {}
        self.problems: dict[int, str] = {}  # reasons of pods that have ended or cannot start
        self.why = ""  # reason why not all of them run, as a clause
        self.started = False  # whether the pods have tasks
        self._api, self.job = api, job
        self._since: dict[int, float] = {}  # time of a pod's error that may pass by itself

    def look(self) -> None:
        """Lists the pods. Raises Unreachable."""
        which = f"job-name={self.job}"
        now = {objects.index_of(pod): pod for pod in self._api.listed("pods", which)}
        for index, old in list(self.found.items()):
            if index in now and now[index]["metadata"]["uid"] == old["metadata"]["uid"]:
                continue
            if self.started:  # its successor, if there is one, does not have the task
                gone = objects.disrupted(old) or "its pod was deleted"
                self.problems.setdefault(index, gone)
            else:
                del self.found[index]
                self.problems.pop(index, None)
        self.found |= now
        self.why = ""
        if not self.found:
            told = self._api.events(self.job)
            self.why = objects.clause("its pods have not been created", told[-1] if told else "")
        for index, pod in now.items():
            why, is_error = objects.blocked(pod)
            if is_error:
                why, _ = objects.blocked(pod, self._api.events(pod["metadata"]["name"]))
                if time.monotonic() - self._since.setdefault(index, time.monotonic()) > _BLOCKED_S:
                    self.problems[index] = why
            else:
                self._since.pop(index, None)
            self.why = why or self.why
            if ended := objects.ended(pod):
                self.problems[index] = ended

    @property
    def running(self) -> list[int]:
        """Indexes of the pods that run."""
        usable = sorted(self.found.keys() - self.problems.keys())
        return [index for index in usable if objects.is_running(self.found[index])]


def _message(error: Any) -> Any:
    """The server's message in an ApiException."""
    try:
        return json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        return error.reason
