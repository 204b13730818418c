"""Ids that take rows on parameter servers: with one worker as in one process.

The program trains each case on the servers and with `model.fit` of one process.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.by_hand import ByHand

pytestmark = pytest.mark.process

STEPS = 40


def equals_one_process(found, is_table=True):
    assert found["table"] == ("Table" if is_table else "ResourceVariable")
    assert found["steps"] == STEPS
    ours, other = found["known"]
    assert ours == other
    assert len(ours) > 8
    ours, other = found["rows"]
    assert ours == other
    assert found["slots_off_by"] == 0
    ours, other = found["loss"]
    assert ours == pytest.approx(other, rel=1e-6), "summed over as many functions as time allows"


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def found(run_cluster, exports):
    flags = ["--cases=Adagrad", f"--export={exports}"]
    return run_cluster("ps_hash_tables.py", *flags, workers=1, ps=2).chief


def test_trains_as_one_process_bit_for_bit(found):
    equals_one_process(found["Adagrad"])
    assert found["Adagrad"]["off_by"] == 0
    ours, _ = found["Adagrad"]["rows"]
    assert 0 in ours
    assert max(ours) > 0


def test_coordinator_looks_up_only(found):
    assert found["lookups"]["changed_nothing"]
    assert found["lookups"]["off_by"] < 1e-6
    ours, other = found["lookups"]["evaluated"]
    assert ours == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("tables", ["whole", "sharded"])
def test_exports_serve(found, exports, tables):
    serve = tf.saved_model.load(str(exports / tables)).signatures["serving_default"]
    (outputs,) = serve(tf.constant(found["lookups"]["ids"], tf.int64)).values()
    np.testing.assert_allclose(outputs, found["lookups"]["predicted"], rtol=1e-5, atol=1e-6)


def test_each_server_has_its_share_of_the_bytes(found):
    most, row, bucket = 100_000, 4 * 4, 16 * (4 * 4 + 16 + 2 * 24)
    assert len(found["bytes"]) == 2
    assert max(found["bytes"]) <= most / 2 + bucket + row
    assert sum(found["bytes"]) <= most
    assert sum(found["bytes"]) > most - 2 * bucket


def test_wrong_use(found):
    assert "is a table on parameter servers, and only tfmw.fit on" in found["called"]
    message = "is a HashTableEmbedding, which gives rows to ids in the order of the workers' steps"
    assert message in found["sync_replicas"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_every_case_equals_one_process(run_cluster, servers):
    found = run_cluster("ps_hash_tables.py", workers=1, ps=servers).chief
    for case in ("Adagrad", "momentum", "Adam", "SGD"):
        equals_one_process(found[case], is_table=servers > 1)
        # If a batch has an id several times, Keras subtracts gradients in another order.
        assert found[case]["off_by"] < (1e-7 if case == "SGD" else 1e-30), case
    for case in ("whole", "one server"):
        equals_one_process(found[case], is_table=False)
        assert found[case]["off_by"] == 0


SEVERAL_THREADS = {"TF_NUM_INTEROP_THREADS": "4"}  # a server runs messages of both workers at once


def each_id_has_one_row(found):
    for name in ("table", "other"):
        one = found[name]
        assert one["shards"] == [0, 1]
        assert one["known"] == one["distinct"] <= one["places"]
        assert sorted(set(one["rows"])) == sorted(one["rows"])
        assert min(one["rows"]) > 0
        assert min(one["often"]) > 0, "ids that all batches have, have rows"
        assert 0.9 * found["bound"] < one["bytes"] <= found["bound"]
    assert found["table"]["known"] > 0.99 * found["table"]["places"]
    assert found["loss"][-1] < 0.9 * found["loss"][0]


@pytest.mark.nightly
def test_two_workers_never_give_one_row_twice(run_cluster):
    run = run_cluster("ps_hash_tables_async.py", workers=2, ps=2, env=SEVERAL_THREADS)
    each_id_has_one_row(run.chief)
    for name in ("table", "other"):
        one = run.chief[name]
        assert one["steps"] == one["last_used"] == run.chief["steps"], "those that overlap are lost"


@pytest.mark.nightly
def test_killed_workers_leave_no_table_locked(tmp_path):
    result = tmp_path / "result.json"
    arguments = [f"--result={result}"]
    with ByHand(
        "ps_hash_tables_async.py", workers=4, ps=2, arguments=arguments, env=SEVERAL_THREADS
    ) as cluster:
        for worker in ("worker 1", "worker 2", "worker 3"):
            cluster.chief.wait_for("ends")
            cluster.kill(worker)
        assert cluster.chief.end() == 0, cluster.chief.output
    found = json.loads(result.read_text())
    each_id_has_one_row(found)
    assert found["table"]["steps"] >= found["steps"]


@pytest.mark.nightly
def test_coordinator_takes_no_memory_for_it(run_cluster, tmp_path):
    """Made, trained, backed up three times, evaluated and exported; the slots come on top."""
    flags = ["--bytes=300_000_000", f"--export={tmp_path}"]
    found = run_cluster("ps_hash_tables.py", *flags, workers=1, ps=2).chief
    large = found["300000000"]
    assert large["bytes"] > 299_000_000
    assert large["rows"] > 0
    assert large["taken"] < 0.25 * large["bytes"]
