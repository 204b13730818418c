"""The manifests of recipes/schedulers: valid by Kubernetes' and Kubeflow's own schemas, and the
environment that they make is one from which tfmw finds the right cluster.

Kubernetes' schemas come with `kubernetes-validate`: the JSON schemas of its API, with unknown
fields refused. The TFJob's come with `kubeflow-training`: the classes made from the operator's API.
No Kubernetes runs here: the functions below set the controllers' variables, each with its source.
"""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow import training

from tests.helpers.cluster import ROOT
from tfmw import Cluster

SCHEDULERS = ROOT / "recipes" / "schedulers"
VERSION = kubernetes_validate.latest_version()


def manifests(name: str) -> dict[str, Any]:
    """Kind -> manifest."""
    text = (SCHEDULERS / name).read_text()
    return {m["kind"]: m for m in yaml.safe_load_all(text) if m is not None}


def validate(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


# ---- an indexed Job -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy", "Job"])
@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes-hosts.yaml"])
def test_the_manifests_are_valid(name: str, kind: str) -> None:
    manifest = manifests(name)[kind]
    validate(manifest)
    assert manifest["kind"] == kind


def test_the_hosts_that_come_and_go_are_the_jobs_pods() -> None:
    """--hosts names every pod as the Service does, and every host gets its own index."""
    job = manifests("kubernetes-hosts.yaml")["Job"]
    service = manifests("kubernetes-hosts.yaml")["Service"]["metadata"]["name"]
    words = shlex.split(job["spec"]["template"]["spec"]["containers"][0]["command"][-1])
    assert words[words.index("--host-index") + 1] == "$JOB_COMPLETION_INDEX"
    assert words[words.index("--hosts") + 1].split(",") == [
        f"{job['metadata']['name']}-{index}.{service}"
        for index in range(job["spec"]["completions"])
    ]
    assert job["spec"]["template"]["spec"]["subdomain"] == service


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "completionMod"), "Indexed"),
        (("spec", "completions"), "four"),
        (("spec", "template", "spec", "containers", 0, "env", 0, "valu"), "4"),
        (("spec", "template", "spec", "containers"), None),
    ],
)
def test_wrong_manifest_is_detected(path: tuple[Any, ...], value: Any) -> None:
    """The schema is strict, or the test above would say nothing."""
    job = manifests("kubernetes.yaml")["Job"]
    place = job
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job)


def environments(job: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Environment of each pod of an indexed Job.

    (kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode: the index, and the host
    name <job>-<index>.)
    """
    (container,) = job["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    for index in range(job["spec"]["completions"]):
        yield {
            **given,
            "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": f"{job['metadata']['name']}-{index}",
        }


def test_pods_of_the_job_resolve_each_other() -> None:
    found = manifests("kubernetes.yaml")
    job, service = found["Job"], found["Service"]
    pod = job["spec"]["template"]["spec"]
    (port,) = (p["containerPort"] for p in pod["containers"][0]["ports"])
    # A pod's name in DNS is <hostname>.<subdomain>, where the subdomain is a headless Service's
    # that selects it (kubernetes.io/docs/concepts/services-networking/dns-pod-service).
    addresses = tuple(
        f"{job['metadata']['name']}-{i}.{pod['subdomain']}:{port}"
        for i in range(job["spec"]["completions"])
    )
    clusters = [Cluster.resolve(environ) for environ in environments(job)]
    assert [cluster.workers for cluster in clusters] == [addresses] * 4
    assert [cluster.index for cluster in clusters] == [0, 1, 2, 3]
    assert job["spec"]["parallelism"] == job["spec"]["completions"]  # all at once
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert [p["port"] for p in service["spec"]["ports"]] == [port]
    # The label that the Job's controller puts on its pods.
    label = {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    policy = found["NetworkPolicy"]["spec"]
    assert service["spec"]["selector"] == label == policy["podSelector"]["matchLabels"]
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": label}}]}]


def test_the_job_with_parameter_servers() -> None:
    """The manifest's comment is right: servers and the coordinator come on top."""
    job = manifests("kubernetes.yaml")["Job"]
    job["spec"]["completions"] = 4 + 2 + 1
    job["spec"]["template"]["spec"]["containers"][0]["env"] += [
        {"name": "TFMW_NUM_PS", "value": "2"}
    ]
    clusters = [Cluster.resolve(environ) for environ in environments(job)]
    assert [c.task for c in clusters] == ["chief"] + ["worker"] * 4 + ["ps"] * 2


def test_pod_failure_policy_distinguishes_failures() -> None:
    rules = manifests("kubernetes.yaml")["Job"]["spec"]["podFailurePolicy"]["rules"]
    by_status = {r["onExitCodes"]["values"][0]: r["action"] for r in rules if "onExitCodes" in r}
    assert by_status == {2: "FailJob", 75: "Ignore"}


# ---- Kubeflow -------------------------------------------------------------------------------


def built(kind: str, data: Any) -> Any:
    """An object of Kubeflow's API: field names and required fields are checked on the way.

    Args:
        kind: as in `openapi_types`: "KubeflowOrgV1TFJobSpec", "dict(str, T)", "list[T]", "int".
        data: of the manifest.
    """
    if kind.startswith("dict("):
        of = kind.removeprefix("dict(").removesuffix(")").partition(", ")[2]
        return {key: built(of, value) for key, value in data.items()}
    model = getattr(training, kind, None)
    if model is None:
        expected = {"str": str, "int": int, "bool": bool}.get(kind, object)
        assert isinstance(data, expected), f"{data!r} is not a {kind}"
        return data
    fields = {there: here for here, there in model.attribute_map.items()}
    assert not (unknown := set(data) - set(fields)), f"{kind} has no {unknown}"
    values = {fields[k]: built(model.openapi_types[fields[k]], v) for k, v in data.items()}
    return model(**values)


def test_the_tfjob_is_valid() -> None:
    job = manifests("tfjob.yaml")["TFJob"]
    made = built("KubeflowOrgV1TFJob", without_templates(job))
    assert made.spec.tf_replica_specs["Worker"].replicas == 4
    assert set(made.spec.tf_replica_specs) == {"Worker", "Evaluator"}
    for replica in job["spec"]["tfReplicaSpecs"].values():
        template = {"metadata": {"name": "pod"}, "template": replica["template"]}
        validate({"apiVersion": "v1", "kind": "PodTemplate", **template})


def without_templates(job: dict[str, Any]) -> dict[str, Any]:
    """Pods and metadata are Kubernetes' own, and checked by its schema."""
    out = copy.deepcopy(job)
    del out["metadata"]
    for replica in out["spec"]["tfReplicaSpecs"].values():
        del replica["template"]
    return out


@pytest.mark.parametrize(
    ("where", "key"),
    [((), "spce"), (("spec",), "tfReplicas"), (("spec", "runPolicy"), "cleanPods")],
)
def test_a_wrong_field_of_the_tfjob_is_found(where: tuple[str, ...], key: str) -> None:
    job = without_templates(manifests("tfjob.yaml")["TFJob"])
    place = job
    for step in where:
        place = place[step]
    place[key] = "x"
    with pytest.raises(AssertionError, match=f"has no .*{key}"):
        built("KubeflowOrgV1TFJob", job)


def tf_config(job: dict[str, Any], kind: str, index: int) -> dict[str, str]:
    """TF_CONFIG that the operator gives a pod (kubeflow/training-operator v1, genTFConfigJSONStr).

    <job>-<type>-<index>.<namespace>.svc, port 2222 by default; evaluators are not in the list.
    """
    name, replicas = job["metadata"]["name"], job["spec"]["tfReplicaSpecs"]
    cluster = {
        of.lower(): [f"{name}-{of.lower()}-{i}.default.svc:2222" for i in range(spec["replicas"])]
        for of, spec in replicas.items()
        if of != "Evaluator"
    }
    task = {"type": kind.lower(), "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})}


def test_pods_of_the_tfjob_resolve_each_other() -> None:
    job = manifests("tfjob.yaml")["TFJob"]
    for replica in job["spec"]["tfReplicaSpecs"].values():
        assert [c["name"] for c in replica["template"]["spec"]["containers"]] == ["tensorflow"]
    worker = Cluster.resolve(tf_config(job, "Worker", 3))
    assert (worker.num_workers, worker.address) == (4, "tfmw-train-worker-3.default.svc:2222")
    evaluator = Cluster.resolve(tf_config(job, "Evaluator", 0))
    assert (evaluator.task, evaluator.num_workers) == ("evaluator", 4)


def test_the_scripts_that_the_manifests_run_exist() -> None:
    for name in ("kubernetes.yaml", "tfjob.yaml"):
        assert "command: [tfmw, run, recipes/digits.py]" in (SCHEDULERS / name).read_text()
    assert Path(ROOT / "recipes" / "digits.py").is_file()


# ---- a TrainJob of Kubeflow Trainer v2 ----------------------------------------------------------


def unknown_fields(given: Any, known: Any, path: str = "") -> list[str]:
    """Paths of fields that a class of the API has dropped."""
    if isinstance(given, dict):
        known = known if isinstance(known, dict) else {}
        return [
            name
            for key, value in given.items()
            for name in (
                unknown_fields(value, known[key], f"{path}.{key}")
                if key in known
                else [f"{path}.{key}"]
            )
        ]
    if isinstance(given, list):
        pairs = enumerate(zip(given, known, strict=True))
        return [n for i, (a, b) in pairs for n in unknown_fields(a, b, f"{path}[{i}]")]
    return []


@pytest.mark.nightly
def test_the_trainjob_is_valid() -> None:
    """The classes that Kubeflow publishes validate it; their parsing drops unknown fields."""
    from kubeflow_trainer_api import models

    found = manifests("trainjob.yaml")
    validate(found["NetworkPolicy"])
    for kind in ("TrainingRuntime", "TrainJob"):
        parsed = getattr(models, f"TrainerV1alpha1{kind}").from_dict(copy.deepcopy(found[kind]))
        assert unknown_fields(found[kind], parsed.to_dict()) == []
    wrong = copy.deepcopy(found["TrainJob"])
    wrong["spec"]["trainer"]["numNode"] = 4
    parsed = models.TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(wrong))
    assert unknown_fields(wrong, parsed.to_dict()) == [".spec.trainer.numNode"]


def test_pods_of_the_trainjob_resolve_each_other() -> None:
    """Trainer names the JobSet after the TrainJob, JobSet its Service and the hosts of its pods.

    (jobset.sigs.k8s.io/docs/concepts: <jobSet>-<job>-<job's index>-<pod's index>.<jobSet>.)
    """
    found = manifests("trainjob.yaml")
    job, runtime = found["TrainJob"], found["TrainingRuntime"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    name = job["metadata"]["name"]
    given = {entry["name"]: entry["value"] for entry in job["spec"]["trainer"]["env"]}
    nodes = job["spec"]["trainer"]["numNodes"]
    hosts = [f"{name}-{replicated['name']}-0-{index}" for index in range(nodes)]
    for index, host in enumerate(hosts):
        pod = {**given, "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": host}
        cluster = Cluster.resolve(pod)
        assert cluster.workers == tuple(f"{h}.{name}:2222" for h in hosts)
        assert cluster.index == index
    label = {"jobset.sigs.k8s.io/jobset-name": name}
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == label
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": label}}]}]
