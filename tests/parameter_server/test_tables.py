"""Tables after kill -9 of any server or the coordinator, and from their backups: bit for bit."""

from __future__ import annotations

import json
import signal

import pytest

from tests.helpers.by_hand import ByHand

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(900)]

EPOCHS, STEPS = 4, 5


def run(folder, ps=2, epochs=EPOCHS, kill=None):
    """Result of one training on `ps` servers; one task may be killed after two epochs."""
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
    assert len(found["known"]) > 32
    assert found == undisturbed


def test_coordinator_killed_while_it_writes_changed_rows(undisturbed, tmp_path):
    """The backups of epochs 1 and 2 have all rows; the one of epoch 3 has those that changed."""
    result = tmp_path / "result.json"
    arguments = [f"--backup={tmp_path / 'backups'}", f"--epochs={EPOCHS}", f"--result={result}"]
    arguments += ["--killed_in_write=4"]
    with ByHand("ps_tables.py", workers=1, ps=2, arguments=arguments) as cluster:
        assert cluster.chief.end() == -signal.SIGKILL, cluster.chief.output
        names = sorted(path.name for path in (tmp_path / "backups").iterdir())
        assert [name for name in names if name.startswith(".step_000000000020.writing")], names
        assert (tmp_path / "backups/step_000000000015/tensors.data-00002-of-00003").exists()
        chief = cluster.start("chief")
        assert chief.wait_for("training begins at").split()[-1] == str(3 * STEPS)
        assert chief.end() == 0, chief.output
    assert json.loads(result.read_text()) == undisturbed


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_restored_on_any_number_of_servers(undisturbed, tmp_path, servers):
    run(tmp_path, epochs=3)  # the last backup has the rows that changed
    assert (tmp_path / "backups/step_000000000015/tensors.data-00002-of-00003").exists()
    found = run(tmp_path, ps=servers)
    for what in ("checksum", "known", "rows"):
        assert found[what] == undisturbed[what]
    assert found["iterations"] == undisturbed["iterations"] == EPOCHS * STEPS
    assert (found["held"] == "Table") == (servers > 1)
