"""Tables after kill -9 of any server or the coordinator, and from their backups: bit for bit."""

from __future__ import annotations

import json

import pytest

from tests.helpers.by_hand import ByHand

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(900)]

EPOCHS, STEPS = 4, 5


def run(folder, ps=2, epochs=EPOCHS, kill=None):
    """What one training on `ps` servers finds, of which one task is killed after two epochs."""
    result = folder / "result.json"
    arguments = [f"--backup={folder / 'backups'}", f"--epochs={epochs}", f"--result={result}"]
    arguments += ["--pause=3"] * (kill is not None)
    with ByHand("ps_tables.py", workers=1, ps=ps, arguments=arguments) as cluster:
        if kill is not None:
            cluster.chief.wait_for("epoch 3 ends")
            cluster.kill(kill)
            if kill != "chief":
                cluster.chief.say("go on")
                assert cluster.chief.end() == 1, cluster.chief.output
                cluster.start(kill)
            chief = cluster.start("chief")
            assert chief.wait_for("training begins at").split()[-1] == str(2 * STEPS)
            chief.wait_for("epoch 3 ends")
            chief.say("go on")
        assert cluster.chief.end() == 0, cluster.chief.output
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("dies", ["ps 0", "ps 1", "chief"])
def test_killed_task(undisturbed, tmp_path, dies):
    found = run(tmp_path, kill=dies)
    assert found["held"] == "Table"
    assert found == undisturbed


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_restored_on_any_number_of_servers(undisturbed, tmp_path, servers):
    run(tmp_path, epochs=2)
    found = run(tmp_path, ps=servers)
    assert found["checksum"] == undisturbed["checksum"]
    assert found["iterations"] == undisturbed["iterations"] == EPOCHS * STEPS
    assert (found["held"] == "Table") == (servers > 1)
