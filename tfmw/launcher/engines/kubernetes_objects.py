"""Objects of a job on Kubernetes as plain JSON, and the reasons that its pods give for a failure.

    tfmw-3fa9c2          a Job of one pod, the controller, which owns everything else
    tfmw-3fa9c2          a Secret with the job's token
    tfmw-3fa9c2-x1y2z    an indexed Job with the tasks of one attempt

Nothing here talks to a cluster. Formats: the Kubernetes API, batch/v1 and core/v1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfmw.launcher.failure import describe_status

JOB, ROLE = "tfmw/job", "tfmw/role"
"""Labels of every object: the job's number, and "controller" or "task"."""

TOKEN, POD, ADDRESS = "TFMW_JOB_TOKEN", "TFMW_POD", "TFMW_POD_IP"
"""Environment variables of each pod: the job's token, and the pod's name and IP address."""

CONTROLLER, INDEX = "TFMW_JOB_CONTROLLER", "JOB_COMPLETION_INDEX"
"""Further ones of a task's pod: the controller's IP address, and the completion index."""

CONTAINER = "tfmw"
"""Name of the container that runs tfmw; others of a pod template run beside it."""

Object = dict[str, Any]

# Reasons of a waiting container that may pass by themselves; all others are errors.
_STARTING = {"", "ContainerCreating", "PodInitializing", "ErrImagePull"}


def name_of(number: str) -> str:
    """Name of a job's controller and Secret."""
    return f"tfmw-{number}"


def merged(base: Any, over: Any) -> Any:
    """A pod template with further fields, which take precedence.

    Containers and variables of the same name are one, as in `kubectl apply`. The resources of a
    container replace others.
    """
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        both = base.keys() & over.keys() - {"resources"}
        return {**base, **over, **{key: merged(base[key], over[key]) for key in both}}
    if isinstance(base, list) and isinstance(over, list):
        items = {item["name"]: item for item in base}
        for item in over:
            old = items.get(item["name"], {})
            whole = {"value", "valueFrom"} & item.keys()  # a variable has only one of them
            items[item["name"]] = item if whole else merged(old, item)
        return list(items.values())
    return over


def secret(number: str, token: str, job: Object) -> Object:
    """The Secret with the token of a job, which the controller's Job owns."""
    named = {"name": name_of(number), "labels": {JOB: number}}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**named, "ownerReferences": [owner(job)]},
        "stringData": {"token": token},
        "immutable": True,
    }


def owner(job: Object) -> Object:
    """The owner reference to a controller's Job, with which objects are deleted."""
    meta = job["metadata"]
    named = {"name": meta["name"], "uid": meta["uid"]}
    return {"apiVersion": "batch/v1", "kind": "Job", **named}


def job(
    number: str, role: str, template: Any, container: Object, pod: Object, spec: Object
) -> Object:
    """A Job whose pods are those of the user's template, with what tfmw needs.

    Args:
        number: number of the job.
        role: "controller" or "task".
        template: the user's template: {"metadata": ..., "spec": ...}.
        container: further fields of the container `CONTAINER`.
        pod: further fields of the template.
        spec: further fields of the Job's spec.
    """
    sources = {TOKEN: {"secretKeyRef": {"name": name_of(number), "key": "token"}}}
    for variable, path in ((POD, "metadata.name"), (ADDRESS, "status.podIP")):
        sources[variable] = {"fieldRef": {"fieldPath": path}}
    own = {
        "name": CONTAINER,
        "env": [{"name": name, "valueFrom": source} for name, source in sources.items()],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **container,
    }
    labels = {JOB: number, ROLE: role, "app.kubernetes.io/managed-by": "tfmw"}
    needs = {
        "metadata": {"labels": labels},
        "spec": {"restartPolicy": "Never", "containers": [own]},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name_of(number), "labels": labels},
        "spec": {**spec, "template": merged(template, merged(pod, needs))},
    }


# ---- what objects say ----------------------------------------------------------------------------


def condition(content: Object, *kinds: str, status: str = "True") -> Object | None:
    """The first condition of an object with one of these types, and this status."""
    found = (content.get("status") or {}).get("conditions") or ()
    return next((c for c in found if c["type"] in kinds and c["status"] == status), None)


def index_of(pod: Object) -> int:
    """Completion index of a pod of an indexed Job; -1 for other pods."""
    annotations = pod["metadata"].get("annotations") or {}
    return int(annotations.get("batch.kubernetes.io/job-completion-index", -1))


def is_running(pod: Object) -> bool:
    """Whether the containers of a pod run, and nobody has asked them to end."""
    return _phase(pod) == "Running" and not pod["metadata"].get("deletionTimestamp")


def ended(pod: Object) -> str:
    """Reason why a pod has ended, as a clause; "" if it has not."""
    status = pod.get("status") or {}
    if _phase(pod) not in ("Failed", "Succeeded"):
        return ""
    if status.get("reason"):  # such as "Evicted"
        return clause(f"its pod has failed ({status['reason']})", status.get("message"))
    if taken := disrupted(pod):
        return taken
    over = [state.get("terminated") or {} for state in _states(pod, "containerStatuses")]
    worst = next((state for state in over if state.get("exitCode")), None)
    if worst is None:
        return "its pod has ended"
    if worst.get("reason") == "OOMKilled":
        return "its container was killed at its limit of memory (OOMKilled): raise the limit"
    code = int(worst["exitCode"])
    how = describe_status(128 - code if code > 128 else code)  # a signal, as a shell reports it
    last = (worst.get("message") or "").strip().splitlines()
    return clause(f"its container has ended: {how}", last[-1] if last else "")


def disrupted(pod: Object) -> str:
    """Reason why Kubernetes takes a pod away, as a clause; "" if it does not."""
    found = condition(pod, "DisruptionTarget")
    if found is None:
        return ""
    return clause("its pod was taken away", found.get("message") or found.get("reason"))


def blocked(pod: Object, events: Sequence[str] = ()) -> tuple[str, bool]:
    """The reason why a pod does not run yet, as a clause, and whether it is an error.

    Args:
        pod: the pod.
        events: messages of the pod's events, such as the text of a failed pull.
    """
    if _phase(pod) != "Pending":
        return "", False
    if unplaced := condition(pod, "PodScheduled", status="False"):
        return clause("no node has room for a pod", unplaced.get("message")), False
    for state in _states(pod, "initContainerStatuses", "containerStatuses"):
        waiting = state.get("waiting") or {}
        if waiting.get("reason", "") not in _STARTING:
            pulls = [text for text in events if "pull image" in text]
            why = (pulls or [waiting.get("message") or ""])[-1]
            return clause(f"a pod cannot start ({waiting['reason']})", why), True
    return "a pod is starting", False


def clause(text: str, why: str | None) -> str:
    """A clause with its reason, if that is known."""
    return f"{text}: {' '.join(why.split()).rstrip('.')}" if why else text


def _states(pod: Object, *kinds: str) -> list[Object]:
    """The states of a pod's containers of these kinds."""
    status = pod.get("status") or {}
    return [c.get("state") or {} for kind in kinds for c in status.get(kind) or ()]


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", "Pending"))
