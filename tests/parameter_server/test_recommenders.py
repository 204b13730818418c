"""Models of KerasRS, whose layers know nothing of tfmw, with their tables on parameter servers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.ratings import TASTES

CASES = ["dcn, SGD", "dcn, Adagrad", "dcn, Adam", "dlrm, Adagrad"]
CASES += ["retrieval, Adam", "retrieval, Adagrad"]


@pytest.mark.process
@pytest.mark.nightly
def test_two_workers_train_them(run_cluster):
    found = run_cluster("ps_recommenders.py", workers=2, ps=2).chief
    for name in ("dcn, Adagrad", "retrieval, Adagrad"):
        assert len(found[name]["tables"]) == found[name]["slots"] == 2, "of users and of films"
        assert found[name]["iterations"] == 60
        assert found[name]["loss"][-1] < 0.9 * found[name]["loss"][0]
    _, rmse = found["dcn, Adagrad"]["evaluated"]
    assert rmse < 0.75, "the mean of all ratings is off by 0.88"
    retrieves(found["retrieved"])


def retrieves(found):
    """Checks the best films of some users."""
    for way in ("of_table", "of_copy"):
        assert found[way]["off_by"] < 1e-5
        films = np.array(found[way]["films"])
        to_taste = films % TASTES == np.arange(len(films))[:, None] % TASTES
        assert to_taste.mean() > 0.4, "of random films an eighth is"


@pytest.fixture(scope="module")
def one_worker(run_cluster, tmp_path_factory):
    """Its result, and where it has exported to."""
    path = tmp_path_factory.mktemp("exports")
    flags = [f"--export={path}"]
    run = run_cluster("ps_recommenders.py", *flags, workers=1, ps=2)
    return run.chief, path


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.timeout(600)
class TestOneWorker:
    @pytest.mark.parametrize("case", CASES)
    def test_training_equals_keras_s_bit_for_bit(self, one_worker, case):
        found = one_worker[0][case]
        assert len(found["tables"]) == 2
        assert found["off_by"] == found["slots_off_by"] == found["predicted_off_by"] == 0.0
        assert found["evaluated"] == found["evaluated_by_keras"]
        assert found["loss"][-1] < 0.9 * found["loss"][0]

    def test_best_films_of_a_table_and_of_a_copy(self, one_worker):
        retrieves(one_worker[0]["retrieved"])

    def test_search_in_a_table_that_is_too_large_is_refused(self, one_worker):
        message = one_worker[0]["retrieved"]["refused"].splitlines()[-1]
        assert "is a table of 1.9 MB on 2 shards of parameter servers" in message
        assert "look up rows with keras.ops.take(table, ids, axis=0)" in message

    def test_exports_serve(self, one_worker):
        found, path = one_worker
        assert found["exported"] == ["sharded", "whole"]
        assert (path / "sharded" / "assets" / "tables.json").exists()
        for name in found["exported"]:
            loaded = tf.saved_model.load(path / name)
            served = loaded.serve(tf.range(64, dtype=tf.int64))
            best = found["retrieved"]["best_scores"]
            np.testing.assert_allclose(served["scores"], best, rtol=1e-5)

    def test_sharded_export_that_searches_in_a_table_is_refused(self, one_worker):
        message = one_worker[0]["retrieved"]["export_refused"]
        assert 'cannot be exported with tables="sharded": a layer reads all rows of it' in message
