"""Parameter-server training on real processes: exact counts, exact metrics, one script for all."""

from __future__ import annotations

import re

import pytest

from tests.helpers.cluster import assert_examples_per_step
from tfmw.train.checkpoint.store import verify

STEPS, EPOCHS = 60, 2


@pytest.fixture(scope="module")
def five(run_cluster, tmp_path_factory):
    """A chief, two workers and two parameter servers train a compiled model."""
    records = tmp_path_factory.mktemp("records") / "steps"
    return run_cluster(
        "ps_train.py",
        f"--records={records}",
        f"--steps={STEPS}",
        f"--epochs={EPOCHS}",
        workers=2,
        ps=2,
    )


@pytest.mark.process
class TestFiveProcesses:
    def test_it_learns(self, five):
        loss = five.chief["history"]["loss"]
        assert loss[-1] < 0.7 * loss[0]
        assert five.chief["history"]["val_accuracy"][-1] > 0.9

    def test_exact_number_of_updates(self, five):
        assert five.chief["iterations"] == STEPS * EPOCHS
        assert five.chief["recorded_steps"] == STEPS * EPOCHS

    def test_metrics_are_of_the_trained_batches(self, five):
        result = five.chief
        assert result["batch_sizes"] == [48], "so that the mean of epochs is that of examples"
        for name in ("accuracy", "loss"):
            mean = sum(result["history"][name]) / EPOCHS
            assert result[f"recorded_{name}"] == pytest.approx(mean, rel=1e-5)

    def test_metrics_that_are_no_sums_and_begin_at_other_values_than_zero(self, five):
        result, history = five.chief, five.chief["history"]
        largest, smallest = result["recorded_extremes"]
        assert max(history["largest"]) == pytest.approx(largest, rel=1e-6)
        assert min(history["smallest"]) == pytest.approx(smallest, rel=1e-6)
        assert sum(history["sum"]) == pytest.approx(result["recorded_sum"], rel=1e-3)
        assert history["examples"] == [STEPS * 48] * EPOCHS

    def test_validation_evaluate_and_predict_agree(self, five):
        result = five.chief
        for name in ("loss", "accuracy"):
            assert result["evaluated"][name] == result["history"][f"val_{name}"][-1]
        assert result["predicted_accuracy"] == pytest.approx(result["evaluated"]["accuracy"])

    def test_methods_of_the_models_class_run(self, five):
        assert five.chief["own methods"] == ["fit", *["evaluate"] * EPOCHS, "evaluate"]

    def test_batch_norm_averages_are_averages(self, five):
        variances = five.chief["moving_variance"]
        assert all(0 < v < 1.5 for v in variances)
        assert any(abs(v - 1) > 0.1 for v in variances), "they have moved from where they began"

    def test_workers_keep_no_copy_of_the_model(self, five):
        assert five.chief["local_variables"] > 10
        assert five.chief["bytes_kept_by_workers"] == [0] * 4

    def test_a_step_that_assigns_a_variable_of_a_loss_is_refused(self, five):
        for message in five.chief["refused"]:
            assert "a step assigns the variable 'scale:0', which the model does not hold" in message
        assert len(five.chief["refused"]) == 2, "of TensorFlow and of Keras"

    def test_seed_generators_advance_by_one_draw_a_step(self, five):
        assert five.chief["draws"] == [0, STEPS * EPOCHS]

    def test_model_is_restored_after_training(self, five):
        assert all("/job:ps" not in device for device in five.chief["devices"])

    def test_progress_shows_the_examples_of_all_workers(self, five):
        assert_examples_per_step(five.output, 48)

    def test_rate_is_steps_over_the_epochs_time(self, five):
        line = r"step +60/60 \| +([\d.]+) steps/s .* took (?:(\d+):)?([\d.]+)"
        rate, minutes, seconds = re.findall(line, five.output)[0]  # the epoch in which steps trace
        took = 60 * int(minutes or 0) + float(seconds)  # validation is in it as well
        assert 0 < STEPS / (float(rate) + 0.05) < took + 1  # the rate is rounded

    def test_only_the_chief_runs_the_script(self, five):
        assert set(five.by_task) == {"chief"}
        assert five.status == 0


def check_rows(found):
    """A table made and trained on servers, beside an ordinary model that Keras trained."""
    assert found["equal_at_first"], "bit for bit"
    assert found["only_used"]
    assert found["changed"] == found["used"]
    assert found["moved"] > 1e-3
    assert found["off_by"] < 1e-6
    assert found["slots_off_by"] < 1e-6


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_every_optimizer_that_updates_rows(run_cluster):
    names = ["Adagrad", "Adam", "AdamW", "momentum", "RMSprop", "Ftrl", "Lion", "amsgrad"]
    names += ["bfloat16", "float16"]
    flags = [f"--optimizers={','.join(names)}", "--only_optimizers"]
    found = run_cluster("ps_shards.py", *flags, workers=1, ps=2, timeout_s=900).chief
    for name in names:
        check_rows(found[name])
        assert found[name]["off_by"] == found[name]["slots_off_by"] == 0.0, name


@pytest.fixture(scope="module")
def shards(run_cluster):
    """One worker trains a table that is divided over two servers, with two optimizers."""
    return run_cluster("ps_shards.py", workers=1, ps=2).chief


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.timeout(600)
class TestDividedVariables:
    def test_a_table_is_divided_over_the_servers(self, shards):
        assert shards["pieces"] == [[0, 0, 10000], [1, 10000, 20000]]

    @pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
    def test_updates_are_those_of_one_process(self, shards, optimizer):
        check_rows(shards[optimizer])

    def test_coordinator_has_handles_without_rows(self, shards):
        found = shards["handle"]
        assert (
            found["repr"]
            == "<Table large/embeddings: float32 [40000, 32], 5.1 MB on 2 parameter servers>"
        )
        for call in ("numpy", "assign", "softmax", "softmax_called"):
            begin, _, end = found[call].rpartition("large/embeddings is a table of 5.1 MB")
            assert "max_whole_bytes=2560000" in end
            assert len(end.splitlines()) == 1
            # Keras says first of which layer it has inferred the output's shape.
            assert not begin or call == "softmax"
        for call in ("default", "add"):
            assert "only tfmw.fit on their strategy updates it" in found[call]

    def test_coordinator_evaluates_and_predicts(self, shards):
        found = shards["coordinator"]
        assert found["evaluated"] == pytest.approx(found["evaluated_alone"], rel=1e-6)
        assert found["predicted_off_by"] < 1e-5

    def test_coordinator_looks_up_rows(self, shards):
        (first, last), (fifth, again) = shards["handle"]["looked_up"]
        assert last == again != first
        assert shards["handle"]["gathered"] == [fifth, first]

    def test_moments_of_earlier_batches_change_no_row(self, shards):
        assert shards["lazy"]

    def test_no_update_beyond_the_limit(self, shards):
        assert shards["limited"] == [[2, 1, 0], 3]

    def test_values_set_by_callbacks_are_sent_to_the_servers(self, shards):
        bias_at_rate_0, bias_then = shards["callbacks"]
        assert bias_at_rate_0 == 7.0
        assert bias_then < 7.0


@pytest.mark.process
@pytest.mark.timeout(700)
@pytest.mark.nightly
def test_servers_back_tables_up_and_restore_them_on_another_number(run_cluster, tmp_path):
    backups = tmp_path / "backups"

    def run(servers, epochs, *more):
        flags = [f"--backup={backups}", f"--epochs={epochs}", *more]
        return run_cluster("ps_shards_backup.py", *flags, workers=1, ps=servers).chief

    first = run(2, 4, f"--export={tmp_path / 'exported'}")
    full, older, newest = sorted(backups.glob("step_*"))
    assert [path.name[-2:] for path in (full, older, newest)] == ["05", "15", "20"]
    names = {path.name for path in newest.iterdir()}
    # The table, 3 files of each server, and what the coordinator and they have written since.
    assert {f"tables.data-0000{i}-of-00006" for i in range(6)} < names
    assert {f"tensors.data-0000{i}-of-00007" for i in range(7)} < names
    assert not [name for name in names if "parts" in name]
    assert (newest / "tables.index").samefile(older / "tables.index")
    assert not list(full.glob("tensors.data-00001-of-*"))
    rows, table = (
        sum(f.stat().st_size for f in newest.glob(f"{n}.*")) for n in ("tensors", "tables")
    )
    assert rows < 0.2 * table, "of 5000 rows 256 have changed"
    assert not verify(backups)
    then = run(3, 6)
    assert (first["servers"], then["servers"]) == ([0, 1], [0, 1, 2])
    assert (first["began_at"], then["began_at"]) == (0, 20)
    assert then["iterations"] == 30
    for found in (first, then):
        assert not found["whole"], "a table is on the servers only"
        (warned,) = found["whole_alone"]
        assert "embedding/embeddings is divided" in warned, "made before the strategy"
        assert found["off_by"] < 1e-6, "from as many epochs in one process"
    exported = first["exported"]
    assert exported["files"] == [
        *(f"variables.data-0000{i}-of-00007" for i in range(7)),
        "variables.index",
    ]
    assert not exported["problems"]
    assert exported["all_off_by"] == 0.0
    assert exported["off_by"] < 1e-6, "from predict, after plain TensorFlow has loaded it"
    sharded = exported["sharded"]
    assert sharded["equal"], "bit for bit as of the export with whole tables"
    files = [f"rows-{number:05d}.tfrecord" for number in range(6)]  # 3 of each server
    assert sharded["files"] == [*files, "tables.json"]
    assert sharded["shapes"] == [[0, 16], [16, 1], [1]], "no variable has the rows"
    message, exists = sharded["refused"]
    assert 'cannot be exported with tables="sharded": a layer reads all rows of it' in message
    assert not exists


@pytest.mark.process
class TestSynchronousUpdates:
    def test_synchronous_steps_equal_those_of_one_process(self, run_cluster):
        run = run_cluster("ps_sync.py", workers=2, ps=2)
        found = run.chief
        assert_examples_per_step(run.output, 64)  # of both workers
        assert found["iterations"] == 40
        assert found["dropped"] == 0
        assert found["moved"] > 0.1
        assert found["off_by"] < 1e-5, "from one process on the batches of both"
        assert "/inputs_scale gets new values as gradients" in found["float8"]

    @pytest.mark.nightly
    def test_stragglers_gradient_is_dropped(self, run_cluster, tmp_path):
        late = f"--late_from={tmp_path / 'late'}"
        run = run_cluster("ps_sync.py", "--aggregate=2", late, workers=3, ps=1)
        found = run.chief
        assert found["iterations"] == 40
        assert found["calls_while_late"] > 0, "signals and backups waited for the straggler"
        assert found["late"] == 0.0, "a gradient of ten steps before moved the weights"
        # Each of its batches takes as long as many steps of the others: all or all but a few late.
        assert 2 <= found["dropped"] <= 40
        assert found["loss"][1] < found["loss"][0]

    def test_error_on_one_worker_ends_all(self, run_cluster):
        run = run_cluster("ps_bad_batch.py", workers=2, ps=1, status=1)
        assert "bad batch" in run.output
        assert re.search(r"^tfmw: chief failed", run.output.splitlines()[-1]), "others echo it"


@pytest.mark.process
@pytest.mark.nightly
def test_run_resumed_inside_an_epoch_has_metrics_of_the_whole_epoch(run_cluster, tmp_path):
    backup = f"--backup={tmp_path / 'backups'}"
    run_cluster("ps_resume.py", backup, "--leave", workers=1, ps=1, status=75)
    found = run_cluster("ps_resume.py", backup, workers=1, ps=1).chief
    assert 100 < found["began_at"] < 200, "inside the second epoch"
    assert found["seen"] == found["examples"] == [2000.0] * 3
    assert found["iterations"] == 300
