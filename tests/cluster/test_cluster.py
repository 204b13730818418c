"""Tables of environments: variables of each launcher, and the result of `Cluster.resolve`."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any, ClassVar

import pytest

from tfmw.cluster.cluster import Cluster
from tfmw.cluster.schedulers import _expand_nodes, _expand_tasks_per_node
from tfmw.errors import ClusterError, TfmwError, UsageError


def tf_config(cluster: Any, task: Any = None) -> dict[str, str]:
    config = {"cluster": cluster} if task is None else {"cluster": cluster, "task": task}
    return {"TF_CONFIG": json.dumps(config)}


def slurm(rank: int, tasks: int, nodes: str, per_node: str | None, **more: str) -> dict[str, str]:
    found = {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_ID": "100",
        **more,
    }
    return found if per_node is None else {**found, "SLURM_STEP_TASKS_PER_NODE": per_node}


def mpi(rank: int, size: int, local_rank: int, local_size: int, **more: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        **more,
    }


def kubernetes(index: int, **more: str) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"train-{index}", **more}


TWO = {"worker": ["a:1", "b:2"]}
WITH_PS = {"chief": ["c:1"], "worker": ["a:1", "b:2"], "ps": ["p:1"]}


class TestSynchronous:
    def test_worker_0_is_the_chief(self):
        first, second = (Cluster(workers=("h0:1", "h1:1"), index=i) for i in (0, 1))
        assert (first.is_chief, second.is_chief) == (True, False)
        assert (first.rank, second.rank) == (0, 1)
        assert first.num_workers == second.num_workers == 2
        assert second.address == "h1:1"
        assert not first.is_single
        assert not first.has_ps

    def test_an_explicit_chief_trains_and_comes_first(self):
        workers = ("h1:1", "h2:1")
        chief, worker = (Cluster(workers, chief=("h0:1",), task=t) for t in ("chief", "worker"))
        assert (chief.is_chief, worker.is_chief) == (True, False)
        assert (chief.rank, worker.rank) == (0, 1)
        assert chief.num_workers == 3
        assert chief.address == "h0:1"
        assert Cluster(workers, chief="h0:1", task="chief") == chief  # type: ignore[arg-type]

    def test_is_a_value(self):
        cluster = Cluster(workers=["h0:1", "h1:1"])  # type: ignore[arg-type]
        assert cluster == Cluster(workers=("h0:1", "h1:1"))
        assert len({cluster, Cluster(workers=("h0:1", "h1:1"))}) == 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            cluster.index = 1  # type: ignore[misc]


class TestParameterServers:
    @pytest.mark.parametrize(
        ("task", "is_chief", "rank"),
        [("chief", True, -1), ("worker", False, 1), ("ps", False, -1), ("evaluator", False, -1)],
    )
    def test_roles(self, task, is_chief, rank):
        cluster = Cluster(
            workers=("a:1", "b:1"),
            chief=("c:1",),
            ps=("p:1", "q:1"),
            task=task,
            index=1 if task in ("worker", "ps") else 0,
        )
        assert cluster.is_chief is is_chief
        assert cluster.rank == rank
        assert cluster.num_workers == 2
        assert cluster.has_ps


def test_a_single_process():
    cluster = Cluster.resolve({})
    assert cluster.is_single
    assert cluster.is_chief
    assert (cluster.num_workers, cluster.rank, cluster.address) == (1, 0, None)
    assert cluster.as_tf_config() == {}


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        (Cluster(), "Cluster(single process)"),
        (Cluster(("h0:1", "h1:1"), index=1), "Cluster(worker 1 of 2 at h1:1)"),
        (
            Cluster(("h0:1", "h1:1"), ("p:1", "q:1"), "c:1", index=1, source="slurm"),  # type: ignore[arg-type]
            "Cluster(worker 1 of 2 at h1:1, chief at c:1, 2 ps, from slurm)",
        ),
        (
            Cluster(("h0:1",), ("p:1",), ("c:1",), task="ps", source="TF_CONFIG"),
            "Cluster(ps 0 of 1 at p:1, chief at c:1, 1 worker, from TF_CONFIG)",
        ),
        (
            Cluster(("h0:1",), (), ("c:1",), task="chief", source="TF_CONFIG"),
            "Cluster(chief at c:1, 1 worker, from TF_CONFIG)",
        ),
        (Cluster(("h0:1",), task="evaluator"), "Cluster(evaluator, 1 worker)"),
    ],
)
def test_the_repr_reads_like_a_sentence(cluster, text):
    assert repr(cluster) == text


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8:1", True),
        ("[2001:4860:4860::8888]:1", True),
        ("127.0.0.1:1", False),
        ("[::1]:1", False),
        ("10.1.2.3:1", False),
        ("172.16.0.1:1", False),
        ("192.168.0.1:1", False),
        ("169.254.1.1:1", False),
        ("[fe80::1%eth0]:1", False),
        ("[fd00::1]:1", False),
        ("8.8.8.8.example:1", False),
        ("localhost:1", False),
    ],
)
def test_public_addresses(address, public):
    cluster = Cluster(workers=(address, "h1:1"))
    assert cluster.is_public() is public
    assert cluster.public_addresses() == ((address,) if public else ())


# environment -> (task, index, number of workers, own address)
TF_CONFIGS = [
    (tf_config(TWO, {"type": "worker", "index": 1}), ("worker", 1, 2, "b:2")),
    (tf_config(TWO, {"type": "worker", "index": "1"}), ("worker", 1, 2, "b:2")),
    (
        tf_config({"master": ["m:1"], "worker": ["a:1"]}, {"type": "master", "index": 0}),
        ("chief", 0, 2, "m:1"),
    ),
    (tf_config(WITH_PS, {"type": "ps", "index": 0}), ("ps", 0, 2, "p:1")),
    (tf_config(WITH_PS, {"type": "chief"}), ("chief", 0, 2, "c:1")),
    (tf_config(TWO, {"type": "evaluator", "index": 0}), ("evaluator", 0, 2, None)),
    (
        tf_config({**TWO, "evaluator": ["e:1"]}, {"type": "evaluator", "index": 0}),
        ("evaluator", 0, 2, "e:1"),
    ),
    (tf_config({"worker": ["[::1]:2222", "b:1"]}, {"type": "worker"} | {"index": 0}),
     ("worker", 0, 2, "[::1]:2222")),
    (tf_config({"worker": ["a:1"]}), ("worker", 0, 1, "a:1")),
    (tf_config({"chief": ["c:1"]}), ("chief", 0, 1, "c:1")),
    (tf_config({"worker": ["a:1"], "ps": [], "chief": []}), ("worker", 0, 1, "a:1")),
    ({"TF_CONFIG": "{}"}, ("worker", 0, 1, None)),
    (tf_config({}), ("worker", 0, 1, None)),
    (tf_config({}, {"type": "worker", "index": 3}), ("worker", 0, 1, None)),
    ({"TF_CONFIG": ""}, ("worker", 0, 1, None)),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "expected"), TF_CONFIGS)
def test_tf_config(environ, expected):
    cluster = Cluster.resolve(environ)
    assert (cluster.task, cluster.index, cluster.num_workers, cluster.address) == expected


def test_tf_config_of_one_task_is_a_single_process():
    assert Cluster.resolve(tf_config({"worker": ["a:1"]})).is_single
    assert not Cluster.resolve(tf_config({"worker": ["a:1"]}, {"type": "evaluator"})).is_single


@pytest.mark.parametrize("task", [("chief", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)])
def test_tf_config_round_trip(task):
    kind, index = task
    config = {"cluster": WITH_PS, "task": {"type": kind, "index": index}}
    cluster = Cluster.resolve({}, cluster=config)
    assert cluster.as_tf_config() == config
    assert Cluster.resolve({}, cluster=cluster.as_tf_config()) == cluster


# name -> (environment, text that the error must contain)
WRONG = {
    "bad json": ({"TF_CONFIG": "{'a': 1}"}, ["not valid JSON", "{'a': 1}", '"worker"']),
    "not an object": ({"TF_CONFIG": "[1]"}, ["TF_CONFIG is [1]", '"cluster"']),
    "cluster not an object": (tf_config(["a:1"]), ["['a:1']", "by task type"]),
    "unknown listed type": (tf_config({"slave": ["a:1"]}), ["'slave'", "use chief, worker, ps"]),
    "unknown own type": (tf_config(TWO, {"type": "boss", "index": 0}), ["'boss'", "use chief"]),
    "no task": (tf_config(TWO), ["lists 2 tasks", 'add "task"']),
    "task not an object": (tf_config(TWO, "worker"), ["worker", '{"type": "worker"']),
    "no index": (tf_config(TWO, {"type": "worker"}), ['no "index"', "add the index"]),
    "index too large": (
        tf_config(TWO, {"type": "worker", "index": 2}),
        ["worker 2", "lists 2 tasks", "correct the index"],
    ),
    "index negative": (tf_config(TWO, {"type": "worker", "index": -1}), ["-1", "integer"]),
    "index a float": (tf_config(TWO, {"type": "worker", "index": 0.5}), ["0.5", "integer"]),
    "index a bool": (tf_config(TWO, {"type": "worker", "index": True}), ["True", "integer"]),
    "index a word": (tf_config(TWO, {"type": "worker", "index": "x"}), ["'x'", "integer"]),
    "no such job": (
        tf_config(TWO, {"type": "ps", "index": 0}),
        ["ps 0", "lists only 2 worker", "correct the task"],
    ),
    "duplicate": (
        tf_config({"worker": ["a:1", "A:1"]}, {"type": "worker", "index": 0}),
        ["A:1", "worker 0 and worker 1", "address of its own"],
    ),
    "duplicate across jobs": (
        tf_config({"chief": ["a:1"], "worker": ["a:1"]}, {"type": "worker", "index": 0}),
        ["chief 0 and worker 0"],
    ),
    "no port": (tf_config({"worker": ["a", "b:1"]}), ["'a'", '"host:port"']),
    "port 0": (tf_config({"worker": ["a:0"]}), ["'a:0'", "1 to 65535"]),
    "port too large": (tf_config({"worker": ["a:65536"]}), ["'a:65536'"]),
    "bare IPv6": (tf_config({"worker": ["::1:2222"]}), ["'::1:2222'", "[::1]:2222"]),
    "a URL": (tf_config({"worker": ["grpc://a:1"]}), ["'grpc://a:1'"]),
    "address not a string": (tf_config({"worker": [5]}), ["5", '"worker"']),
    "addresses not a list": (tf_config({"worker": {"0": "a:1"}}), ["{'0': 'a:1'}", "a list"]),
    "addresses in one string": (
        tf_config({"worker": "a:1"}, {"type": "worker", "index": 0}),
        ["'a:1'", '"worker"', 'write a list such as ["h0:2222", "h1:2222"]'],
    ),
    "a chief in a string": (tf_config({"chief": "c:1"}), ["'c:1'", '"chief"', "write a list"]),
    "no workers": (
        tf_config({"worker": []}, {"type": "worker", "index": 0}),
        ['no address under "worker"', '"cluster": {"worker": ["h0:2222", "h1:2222"]}'],
    ),
    "no workers beside a chief": (
        tf_config({"chief": ["c:1"], "worker": []}),
        ['no address under "worker"', "leave it out"],
    ),
    "no tasks": (tf_config({"ps": []}), ['no address under "ps"']),
    "two chiefs": (
        tf_config({"chief": ["a:1", "b:1"]}, {"type": "chief", "index": 0}),
        ["2 chiefs", "keep one"],
    ),
    "chief and master": (tf_config({"chief": ["a:1"], "master": ["b:1"]}), ["twice"]),
    "ps without chief": (
        tf_config({"worker": ["a:1"], "ps": ["p:1"]}, {"type": "ps", "index": 0}),
        ["1 ps", 'no "chief"'],
    ),
    "ps without workers": (
        tf_config({"chief": ["a:1"], "ps": ["p:1"]}, {"type": "ps", "index": 0}),
        ["1 ps", 'no "worker"'],
    ),
    "evaluators only": (tf_config({"evaluator": ["e:1"]}), ["evaluators only"]),
    "slurm: bad node list": (slurm(0, 2, "n[1-", "2"), ["'n[1-'", "n[01-03,7],m2"]),
    "slurm: empty range": (slurm(0, 2, "n[3-1]", None), ["'n[3-1]'", "no node"]),
    "slurm: bad tasks per node": (slurm(0, 2, "n1", "2x1"), ["'2x1'", "3(x2),1"]),
    "slurm: sums differ": (slurm(0, 3, "n[1-2]", "1(x2)"), ["3 tasks", "1(x2)", "one srun"]),
    "slurm: uneven": (slurm(0, 3, "n[1-2]", None), ["3 tasks on 2 nodes", "SLURM_STEP_TASKS"]),
    "slurm: rank": (slurm(2, 2, "n[1-2]", "1(x2)"), ["2 of 2 tasks"]),
    "slurm: not a number": (slurm(0, 2, "n1", "2", SLURM_PROCID="x"), ["SLURM_PROCID is 'x'"]),
    "slurm: other layout": (
        slurm(1, 4, "n[1-2]", "2(x2)", SLURM_NODEID="1", SLURM_LOCALID="0"),
        ["task 1 on node 1", "--distribution=block"],
    ),
    "slurm: too many ps": (slurm(0, 2, "n1", "2", TFMW_NUM_PS="1"), ["TFMW_NUM_PS is 1", "3"]),
    "slurm: no nodes": (
        {k: v for k, v in slurm(0, 2, "n1", "2").items() if k != "SLURM_STEP_NODELIST"},
        ["SLURM_STEP_NODELIST is not set", "srun"],
    ),
    "slurm: port": (slurm(0, 2, "n1", "2", TFMW_PORT="70000"), ["70000", "65535"]),
    "kubernetes: no size": (kubernetes(0), ["TFMW_NUM_WORKERS", "TFMW_SERVICE"]),
    "kubernetes: no service": (kubernetes(0, TFMW_NUM_WORKERS="2"), ["TFMW_SERVICE is not set"]),
    "kubernetes: host name": (
        kubernetes(1, TFMW_NUM_WORKERS="2", TFMW_SERVICE="s", HOSTNAME="box"),
        ["'box'", "<job>-1", "TFMW_HOSTS"],
    ),
    "kubernetes: index": (kubernetes(2, TFMW_NUM_WORKERS="2", TFMW_SERVICE="s"), ["2 of 2"]),
    "open mpi: no hosts": (mpi(0, 4, 0, 2), ["several hosts", "-x TFMW_HOSTS"]),
    "open mpi: few hosts": (mpi(0, 4, 0, 2, TFMW_HOSTS="a,b,c"), ["3 hosts for 4"]),
    "open mpi: other order": (mpi(1, 4, 0, 2, TFMW_HOSTS="a,b"), ["2 hosts", "of the ranks"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_description_raises_one_sentence(what):
    environ, parts = WRONG[what]
    with pytest.raises(ClusterError) as caught:
        Cluster.resolve(environ)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message
    assert message.endswith(".")
    assert caught.value.status == 2
    assert isinstance(caught.value, UsageError | TfmwError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n1", "n1"),
        ("n[01-03,7],m2", "n01 n02 n03 n7 m2"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("a-b[1]-ib,c.d", "a-b1-ib c.d"),
    ],
)
def test_slurm_node_lists(text, nodes):
    assert list(_expand_nodes(text)) == nodes.split()


@pytest.mark.parametrize("text", ["", "n[", "n[]", "n[a]", "n1,,n2", "n1,", ",n1", "n[1-2"])
def test_wrong_slurm_node_lists(text):
    with pytest.raises(ClusterError, match="node list"):
        list(_expand_nodes(text))


def test_slurm_tasks_per_node():
    assert _expand_tasks_per_node("3(x2),1") == [3, 3, 1]
    assert _expand_tasks_per_node("2") == [2]


class TestSlurm:
    # job 100: 12000 + 16 * 100 = 13600
    def test_each_task_has_its_own_rank_and_port(self):
        found = [Cluster.resolve(slurm(i, 3, "n[1-2]", "2,1")) for i in range(3)]
        assert found[0].workers == ("n1:13600", "n1:13601", "n2:13600")
        assert {cluster.workers for cluster in found} == {found[0].workers}
        assert [cluster.index for cluster in found] == [0, 1, 2]
        assert repr(found[2]) == "Cluster(worker 2 of 3 at n2:13600, from slurm)"

    def test_cyclic_distribution(self):
        environ = slurm(1, 4, "n[1-2]", "2(x2)", SLURM_DISTRIBUTION="cyclic:block")
        environ |= {"SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
        assert Cluster.resolve(environ).workers == ("n1:13600", "n2:13600", "n1:13601", "n2:13601")

    def test_the_last_tasks_are_parameter_servers(self):
        found = [
            Cluster.resolve(slurm(i, 4, "n[1-4]", "1(x4)", TFMW_NUM_PS="1", TFMW_PORT="2000"))
            for i in range(4)
        ]
        assert [(c.task, c.index) for c in found] == [
            ("chief", 0),
            ("worker", 0),
            ("worker", 1),
            ("ps", 0),
        ]
        assert found[0].as_tf_config()["cluster"] == {
            "chief": ["n1:2000"],
            "worker": ["n2:2000", "n3:2000"],
            "ps": ["n4:2000"],
        }

    def test_without_tasks_per_node_they_are_spread_evenly(self):
        environ = slurm(0, 4, "n[1-2]", None, TFMW_PORT="1")
        assert Cluster.resolve(environ).workers == ("n1:1", "n1:2", "n2:1", "n2:2")

    def test_neighbouring_jobs_and_steps_take_other_ports(self):
        def ports(job: int, step: int) -> set[str]:
            more = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
            workers = Cluster.resolve(slurm(0, 8, "n1", "8") | more).workers
            return {address.partition(":")[2] for address in workers}

        runs = [ports(j, s) for j in (100, 101, 102) for s in (0, 1, 2)]
        assert len(set.union(*runs)) == sum(map(len, runs))
        assert all(12000 <= int(port) < 32000 for run in runs for port in run)

    @pytest.mark.parametrize(
        "environ",
        [
            slurm(0, 1, "n1", "1"),
            # A batch script sees the job's number of tasks, and is no task of any step.
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-4]"},
            # A login shell of salloc is no task at all.
            {"SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-4]"},
            # A one-task step of a large job: an interactive shell.
            slurm(0, 4, "n1", "1", SLURM_STEP_NUM_TASKS="1"),
        ],
    )
    def test_process_outside_of_a_step_is_a_single_process(self, environ):
        assert repr(Cluster.resolve(environ)) == "Cluster(single process)"


class TestKubernetes:
    def test_pods_have_names_of_the_service(self):
        environ = kubernetes(1, TFMW_NUM_WORKERS="2", TFMW_SERVICE="svc.ns.svc")
        cluster = Cluster.resolve(environ)
        assert cluster.workers == ("train-0.svc.ns.svc:2222", "train-1.svc.ns.svc:2222")
        assert (cluster.index, cluster.source) == (1, "kubernetes")

    def test_parameter_servers_and_the_chief_add_to_the_workers(self):
        more = {"TFMW_NUM_WORKERS": "2", "TFMW_NUM_PS": "1", "TFMW_SERVICE": "s", "TFMW_PORT": "9"}
        found = [Cluster.resolve(kubernetes(i, **more)) for i in range(4)]
        assert [c.task for c in found] == ["chief", "worker", "worker", "ps"]
        assert found[3].address == "train-3.s:9"
        assert found[0].num_workers == 2

    def test_pods_that_train_alone(self):
        assert Cluster.resolve(kubernetes(3, TFMW_NUM_WORKERS="1")).is_single

    def test_hosts_by_hand(self):
        cluster = Cluster.resolve(kubernetes(1, TFMW_HOSTS="a, b:7"))
        assert cluster.workers == ("a:2222", "b:7")


class TestOpenMpi:
    def test_on_one_host(self):
        assert Cluster.resolve(mpi(1, 2, 1, 2)).workers == ("localhost:2222", "localhost:2223")

    def test_one_host_per_process(self):
        cluster = Cluster.resolve(mpi(1, 2, 0, 1, TFMW_HOSTS="a,b:7", TFMW_PORT="5"))
        assert cluster.workers == ("a:5", "b:7")

    def test_hosts_are_filled_one_after_the_other(self):
        cluster = Cluster.resolve(mpi(2, 4, 0, 2, TFMW_HOSTS="a,b", TFMW_PORT="5"))
        assert cluster.workers == ("a:5", "a:6", "b:5", "b:6")
        assert cluster.address == "b:5"

    def test_two_jobs_on_one_host_take_other_ports(self):
        jobs = [
            Cluster.resolve(mpi(0, 2, 0, 2, PMIX_NAMESPACE=f"prterun-h-{n}@1")).workers
            for n in (1, 2)
        ]
        assert not set(jobs[0]) & set(jobs[1])

    def test_a_lone_process(self):
        assert Cluster.resolve(mpi(0, 1, 0, 1)).is_single


def vertex(pool: str, index: int, **pools: list[str]) -> dict[str, str]:
    """Environment of a replica of a custom job on Vertex AI."""
    spec = {
        "cluster": pools,
        "environment": "cloud",
        "task": {"type": pool, "index": index, "trial": "1"},
        "job": "{}",
    }
    return {"CLUSTER_SPEC": json.dumps(spec)}


class TestVertex:
    pools: ClassVar[dict[str, list[str]]] = {
        "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
        "workerpool1": [f"cmle-training-workerpool1-ab-{i}:2222" for i in range(2)],
    }

    def test_pool_0_is_the_chief_and_pool_1_are_the_workers(self):
        cluster = Cluster.resolve(vertex("workerpool1", 1, **self.pools))
        assert (cluster.task, cluster.index, cluster.num_workers) == ("worker", 1, 3)
        assert cluster.chief == ("cmle-training-workerpool0-ab-0:2222",)
        assert cluster.address == "cmle-training-workerpool1-ab-1:2222"
        assert cluster.source == "vertex"

    def test_pools_2_and_3_are_servers_and_evaluators(self):
        more = {**self.pools, "workerpool2": ["p:2222"], "workerpool3": ["e:2222"]}
        server = Cluster.resolve(vertex("workerpool2", 0, **more))
        assert (server.task, server.num_workers, server.has_ps) == ("ps", 2, True)
        assert Cluster.resolve(vertex("workerpool3", 0, **more)).task == "evaluator"

    def test_a_job_of_one_replica_is_a_single_process(self):
        assert Cluster.resolve(vertex("workerpool0", 0, workerpool0=["a:2222"])).is_single

    def test_other_use_of_cluster_spec_is_ignored(self):
        for text in ("3 nodes", "[]", json.dumps({"cluster": {"worker": ["a:1"]}})):
            assert Cluster.resolve({"CLUSTER_SPEC": text}).source == "none"

    def test_wrong_pools_and_tasks_raise(self):
        with pytest.raises(ClusterError, match="worker pool 'workerpool4'"):
            Cluster.resolve(vertex("workerpool0", 0, **self.pools, workerpool4=["x:1"]))
        with pytest.raises(ClusterError, match="CLUSTER_SPEC describes this process as worker 2"):
            Cluster.resolve(vertex("workerpool1", 2, **self.pools))


class TestSageMaker:
    hosts: ClassVar[dict[str, str]] = {
        "SM_HOSTS": '["algo-1","algo-2","algo-3"]',
        "SM_CURRENT_HOST": "algo-2",
    }

    def test_each_host_is_a_worker(self):
        cluster = Cluster.resolve(self.hosts)
        assert cluster.workers == ("algo-1:2222", "algo-2:2222", "algo-3:2222")
        assert (cluster.index, cluster.source) == (1, "sagemaker")

    def test_parameter_servers_and_ports(self):
        cluster = Cluster.resolve({**self.hosts, "TFMW_NUM_PS": "1", "TFMW_PORT": "9"})
        assert (cluster.task, cluster.address, cluster.ps) == ("worker", "algo-2:9", ("algo-3:9",))

    def test_one_host_is_a_single_process(self):
        one = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}
        assert Cluster.resolve(one).is_single

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [({"SM_CURRENT_HOST": "algo-4"}, "not in SM_HOSTS"), ({"SM_HOSTS": "algo-1"}, "a list")],
    )
    def test_wrong_environment_raises(self, wrong, said):
        with pytest.raises(ClusterError, match=said):
            Cluster.resolve({**self.hosts, **wrong})


class TestHosts:
    def test_this_machine_is_found_among_the_hosts(self):
        # 198.51.100.0/24 is for documentation (RFC 5737): no machine has it.
        cluster = Cluster.of_hosts(["198.51.100.1", "127.0.0.1:7", "198.51.100.2"])
        assert cluster.workers == ("198.51.100.1:2222", "127.0.0.1:7", "198.51.100.2:2222")
        assert cluster.index == 1
        assert repr(cluster) == "Cluster(worker 1 of 3 at 127.0.0.1:7, from hosts)"

    @pytest.mark.parametrize(
        ("hosts", "said"),
        [
            (["127.0.0.1:1", "127.0.0.1:2"], "2 of them are an address of this machine"),
            (["198.51.100.1", "198.51.100.2"], "none of them is an address of this machine"),
            (["h0", "h0"], "h0:2222 for both worker 0 and worker 1"),
        ],
    )
    def test_ambiguous_host_needs_host_index(self, hosts, said):
        with pytest.raises(ClusterError, match=said):
            Cluster.of_hosts(hosts, 0 if hosts == ["h0", "h0"] else None)

    def test_the_last_hosts_are_parameter_servers(self):
        found = [Cluster.of_hosts(["h0", "h1", "h2"], i, ps=1) for i in range(3)]
        assert [c.task for c in found] == ["chief", "worker", "ps"]


class TestOrder:
    environ = (
        tf_config(TWO, {"type": "worker", "index": 0})
        | slurm(0, 2, "n1", "2")
        | kubernetes(0, TFMW_NUM_WORKERS="2", TFMW_SERVICE="s")
        | mpi(0, 2, 0, 2)
    )

    def test_explicit_then_tf_config_then_slurm_then_kubernetes_then_open_mpi(self):
        environ, found = dict(self.environ), []
        for prefix in ("TF_CONFIG", "SLURM_", "JOB_", "OMPI_"):
            found.append(Cluster.resolve(environ).source)
            environ = {k: v for k, v in environ.items() if not k.startswith(prefix)}
        assert found == ["TF_CONFIG", "slurm", "kubernetes", "open mpi"]
        assert Cluster.resolve(self.environ, cluster={"cluster": TWO, "task": {"type": "worker",
            "index": 1}}).index == 1  # fmt: skip
        own = Cluster(("x:1", "y:1"))
        assert Cluster.resolve(self.environ, cluster=own) is own

    def test_wrong_description_does_not_fall_through(self):
        with pytest.raises(ClusterError, match="TF_CONFIG"):
            Cluster.resolve(self.environ | {"TF_CONFIG": "nonsense"})

    def test_the_environment_of_the_process_is_the_default(self, monkeypatch):
        monkeypatch.setenv("TF_CONFIG", self.environ["TF_CONFIG"])
        assert Cluster.resolve().workers == ("a:1", "b:2")


def test_resolve_imports_no_tensorflow():
    code = (
        "import sys, tfmw; tfmw.Cluster.resolve({}); import tfmw.launcher.run, tfmw.cli;"
        "print([m for m in ('tensorflow', 'keras', 'numpy') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "[]", answer.stderr
