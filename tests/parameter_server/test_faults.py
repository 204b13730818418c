"""kill -9 on each kind of task of a parameter-server cluster, started by hand."""

from __future__ import annotations

import json

import pytest

from tests.helpers.by_hand import ByHand

pytestmark = pytest.mark.process

STEPS = 60


def run_until_the_end(cluster, result):
    assert cluster.chief.end() == 0, cluster.chief.output
    others = [name for name in cluster.tasks if name != "chief"]
    statuses = {name: cluster.end(name) for name in others}
    assert statuses == dict.fromkeys(others, 0), {n: cluster.tasks[n].output for n in others}
    return json.loads(result.read_text())


@pytest.mark.nightly
def test_killed_worker_is_replaced_while_others_continue(tmp_path):
    result = tmp_path / "result.json"
    # The time until both workers train depends on the machine: epochs repeat until then.
    arguments = ["--epochs=100000", f"--steps={STEPS}", "--phases=both,any,one,both"]
    arguments += [f"--result={result}"]
    with ByHand("ps_faulty.py", workers=2, ps=1, arguments=arguments) as cluster:
        cluster.chief.wait_for("phase over: both")
        cluster.chief.say("go on")
        cluster.chief.wait_for("batch ")
        cluster.kill("worker 0")
        cluster.chief.wait_for("phase over: any")
        cluster.chief.say("without worker 0")
        alone = int(cluster.chief.wait_for("phase over: one").split()[-1])
        cluster.start("worker 0").wait_for("serving")
        cluster.chief.say("with worker 0 again")
        cluster.chief.wait_for("phase over: both")
        cluster.chief.say("and end")
        found = run_until_the_end(cluster, result)
    by_worker_1 = found["by_worker_1"]
    updates = len(by_worker_1) * STEPS
    assert found["iterations"] == updates, "each once, also those that were under way"
    assert by_worker_1[alone] == 1
    assert 0 < by_worker_1[-1] < 1, "it came back and works"
    assert found["evaluated"] > 0.9


@pytest.mark.parametrize("dies", ["ps 0", "chief"])
@pytest.mark.nightly
def test_killed_server_or_coordinator_resumes_from_the_backup(tmp_path, dies):
    result = tmp_path / "result.json"
    arguments = [
        *("--epochs=5", f"--steps={STEPS}", "--pause=2"),
        *(f"--result={result}", f"--backup={tmp_path / 'backups'}"),
    ]
    with ByHand("ps_faulty.py", workers=1, ps=1, arguments=arguments) as cluster:
        cluster.chief.wait_for("epoch 2 ends at 120")
        cluster.chief.say("go on")
        cluster.chief.wait_for("batch ")
        cluster.kill(dies)
        if dies == "ps 0":
            assert cluster.chief.end() == 1
            assert "UnavailableError" in cluster.chief.output
            cluster.start("ps 0")
        chief = cluster.start("chief")
        begins = chief.wait_for("training begins at ")
        chief.say("go on")  # heard where the backup of epoch 2 had not been written yet
        assert int(begins.split()[-1]) in (STEPS, 2 * STEPS), "the backup of an epoch's end"
        found = run_until_the_end(cluster, result)
    assert found["iterations"] == 5 * STEPS
    assert len(found["accuracy"]) == 5, "History has the epochs of before as well"
    assert found["evaluated"] > 0.9
