"""Parameter-server training on real processes: exact counts, exact metrics, one script for all."""

from __future__ import annotations

import pytest

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
        timeout_s=150,
    )


@pytest.mark.multiprocess
class TestFiveProcesses:
    def test_it_learns(self, five):
        loss = five.chief["history"]["loss"]
        assert loss[-1] < 0.7 * loss[0]
        assert five.chief["history"]["val_accuracy"][-1] > 0.9

    def test_exactly_so_many_updates_were_applied(self, five):
        assert five.chief["iterations"] == STEPS * EPOCHS
        assert five.chief["recorded_steps"] == STEPS * EPOCHS

    def test_metrics_are_those_of_the_batches_that_were_trained_on(self, five):
        result = five.chief
        assert result["batch_sizes"] == [48], "so that the mean of epochs is that of examples"
        for name in ("accuracy", "loss"):
            mean = sum(result["history"][name]) / EPOCHS
            assert result[f"recorded_{name}"] == pytest.approx(mean, rel=1e-5)

    def test_validation_evaluate_and_predict_agree(self, five):
        result = five.chief
        for name in ("loss", "accuracy"):
            assert result["evaluated"][name] == result["history"][f"val_{name}"][-1]
        assert result["predicted_accuracy"] == pytest.approx(result["evaluated"]["accuracy"])

    def test_batch_norm_averages_are_averages(self, five):
        variances = five.chief["moving_variance"]
        assert all(0 < v < 1.5 for v in variances)
        assert any(abs(v - 1) > 0.1 for v in variances), "they have moved from where they began"

    def test_seed_generators_advance_by_one_draw_a_step(self, five):
        assert five.chief["draws"] == [0, STEPS * EPOCHS]

    def test_the_model_is_an_ordinary_one_again(self, five):
        assert all("/job:ps" not in device for device in five.chief["devices"])

    def test_only_the_chief_runs_the_script(self, five):
        assert set(five.by_task) == {"chief"}
        assert five.status == 0
