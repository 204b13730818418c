"""Requests to the API server of a Kubernetes cluster, by the official client.

    api = Api.connected(context="", namespace="")
    api.create_job(job)
    api.pods("job-name=tfmw-3fa9c2")

Objects are plain JSON. A request is repeated for a while if the server is busy or away; then
`Unreachable` is raised. Requests that the server refuses raise UsageError with its message.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfmw.errors import TfmwError, UsageError
from tfmw.launcher.engines import kubernetes_objects as objects
from tfmw.launcher.engines.engine import library
from tfmw.launcher.engines.kubernetes_objects import Object

_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_LATER = (408, 429, 500, 502, 503, 504)  # statuses after which a request is repeated
_REPLY_S = 15.0  # time for one reply
_RETRY_S = 0.5
_BLOCKED_S = 60.0  # time for which a pod may have an error, such as a failed pull of its image


class Unreachable(TfmwError):
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

    def create_job(self, job: Object) -> Object:
        """Creates a Job; the existing one if a lost reply has created it."""
        try:
            return self._call("create Jobs", self._batch.create_namespaced_job, job)
        except _Exists:
            found = self.job(job["metadata"]["name"])
            assert found is not None
            return found

    def job(self, name: str) -> Object | None:
        """A Job; None if there is none."""
        return self._found("read Jobs", self._batch.read_namespaced_job, name)

    def jobs(self, selector: str) -> list[Object]:
        """The Jobs with these labels."""
        return self._listed("list Jobs", self._batch.list_namespaced_job, selector)

    def delete_job(self, name: str) -> None:
        """Deletes a Job, and what it owns."""
        delete = self._batch.delete_namespaced_job
        self._found("delete Jobs", delete, name, propagation_policy="Background")

    def pods(self, selector: str) -> list[Object]:
        """The pods with these labels, the oldest first."""
        found = self._listed("list pods", self._core.list_namespaced_pod, selector)
        return sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))

    def events(self, name: str) -> list[Object]:
        """The events of an object; none if they may not be read."""
        try:
            request = self._core.list_namespaced_event
            listed = self._call(
                "list events", request, field_selector=f"involvedObject.name={name}"
            )
        except (UsageError, Unreachable):
            return []
        return list(listed["items"])

    def create_secret(self, secret: Object) -> None:
        """Creates a Secret."""
        self._call("create Secrets", self._core.create_namespaced_secret, secret)

    def token(self, name: str) -> bytes | None:
        """The token in a Secret; None if there is none."""
        found = self._found("read Secrets", self._core.read_namespaced_secret, name)
        return None if found is None else base64.b64decode(found["data"]["token"])

    def version(self) -> tuple[int, int]:
        """Major and minor version of the server."""
        ask = self.kubernetes.client.VersionApi(self.client).get_code
        found = self._call("read the version", ask, everywhere=True)
        return int(found["major"]), int(found["minor"].rstrip("+"))

    def forwarded(self, pod: str, port: int) -> socket.socket:
        """A connection to a port of a pod, through the API server. Raises OSError."""
        # The client replaces a method of this object for the time of the call.
        client = self.kubernetes.client
        core = client.CoreV1Api(client.ApiClient(self.client.configuration))
        connect = core.connect_get_namespaced_pod_portforward
        try:
            forward = self.kubernetes.stream.portforward
            ports = forward(connect, pod, self.namespace, ports=str(port))
        except client.ApiException as error:
            raise ConnectionError(f"no port of {pod} is forwarded: {error.reason}") from error
        found: socket.socket = ports.socket(port)
        return found

    @property
    def _batch(self) -> Any:
        return self.kubernetes.client.BatchV1Api(self.client)

    @property
    def _core(self) -> Any:
        return self.kubernetes.client.CoreV1Api(self.client)

    def _listed(self, what: str, request: Any, selector: str) -> list[Object]:
        return list(self._call(what, request, label_selector=selector)["items"])

    def _found(self, what: str, request: Any, name: str, **options: Any) -> Object | None:
        try:
            return self._call(what, lambda *a, **o: request(name, *a, **o), **options)
        except _Missing:
            return None

    def _call(
        self,
        what: str,
        request: Callable[..., Any],
        *body: Object,
        everywhere: bool = False,
        **options: Any,
    ) -> Object:
        """The reply to a request, as JSON."""
        from urllib3.exceptions import HTTPError

        where = () if everywhere else (self.namespace,)
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                found = request(*where, *body, _request_timeout=_REPLY_S, **options)
                reply: Object = self.client.sanitize_for_serialization(found)
                return reply
            except self.kubernetes.client.ApiException as error:
                if error.status not in _LATER:
                    raise _refused(what, self.namespace, error) from error
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
        self._api, self._job = api, job
        self._since: dict[int, float] = {}  # time of a pod's error that may pass by itself

    def look(self) -> None:
        """Lists the pods. Raises Unreachable."""
        now = {objects.index_of(pod): pod for pod in self._api.pods(f"job-name={self._job}")}
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
        self.why = "" if self.found else self._why_none()
        for index, pod in now.items():
            self._judge(index, pod)

    @property
    def running(self) -> list[int]:
        """Indexes of the pods that run."""
        usable = sorted(self.found.keys() - self.problems.keys())
        return [index for index in usable if objects.is_running(self.found[index])]

    def _judge(self, index: int, pod: Object) -> None:
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

    def _why_none(self) -> str:
        told = [e.get("message", "") for e in self._api.events(self._job)]
        return f"its pods have not been created{f': {told[-1]}' if told else ''}"


class _Missing(UsageError):
    """Error for an object that does not exist."""


class _Exists(UsageError):
    """Error for an object that exists."""


def _refused(what: str, namespace: str, error: Any) -> UsageError:
    try:
        message = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        message = error.reason
    kind = {404: _Missing, 409: _Exists}.get(error.status, UsageError)
    return kind(
        f"Kubernetes refuses to {what} in the namespace {namespace} ({error.status}): {message}"
    )
