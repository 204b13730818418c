"""Scripts of plain Keras: `model.fit` and Keras's other methods, without a line of tfmw."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers.buckets import s3
from tests.helpers.cluster import PROGRAMS, run_command
from tests.helpers.prepared import X, Y, prepared
from tfmw.cluster.cluster import BACKUP_DIR
from tfmw.compat import model_methods
from tfmw.errors import UsageError
from tfmw.observe import stacks
from tfmw.train import plain_calls, strategies
from tfmw.train.checkpoint import resume
from tfmw.train.checkpoint.store import BackupStore

# ---- on workers --------------------------------------------------------------------------------


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, array) of each list of numbers in a result."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, f"{name}/{key}")
    elif isinstance(value, list) and any(isinstance(each, list) for each in value):
        for number, each in enumerate(value):
            yield from leaves(each, f"{name}/{number}")
    else:
        yield name, np.asarray(value)


def assert_equal(numbers: Any, expected: Any) -> None:
    found, wanted = dict(leaves(numbers)), dict(leaves(expected))
    assert found.keys() == wanted.keys()
    assert wanted
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def by_keras(mode: str, folder: Path, **variables: str) -> dict[str, Any]:
    """The numbers of the program in a process of its own, without tfmw."""
    folder.mkdir()
    program = PROGRAMS / "plain_keras.py"
    status, output = run_command("python", program, mode, str(folder), env=variables)
    assert status == 0, output
    numbers: dict[str, Any] = json.loads(output.splitlines()[-1])
    return numbers


@pytest.mark.process
def test_a_plain_script_has_the_numbers_of_one_process(run_cluster, tmp_path):
    expected = by_keras("all", tmp_path / "keras")
    run = run_cluster("plain_keras.py", "all", str(tmp_path))
    chief, other = run
    assert ALONE not in run.output
    assert chief["numbers"] == other["numbers"]
    assert_equal(chief["numbers"], expected)
    assert chief["drawn"] == other["drawn"], "numbers that the script draws without a seed"
    for name in ("model.keras", "function.keras"):
        assert keras.saving.load_model(tmp_path / name).count_params() == 49
    assert (tmp_path / "exported" / "saved_model.pb").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")], "no leftovers"


@pytest.mark.process
def test_a_plain_script_of_two_trainings_resumes_the_second(run_cluster, tmp_path):
    options = ["--max-restarts", "1", "--backup-dir", str(tmp_path / "backups")]
    chief, other = run_cluster("plain_keras.py", "twice", str(tmp_path), options=options)
    assert (tmp_path / "killed").exists()
    assert chief["begun"] == other["begun"] == [2, 3], "the first one is not trained again"
    expected = by_keras("twice", tmp_path / "keras", ORDER=json.dumps(chief["order"]))
    assert_equal(chief["numbers"], expected)
    assert chief["numbers"] == other["numbers"]
    kept = [BackupStore(folder).newest() for folder in (tmp_path / "backups").iterdir()]
    assert [backup is not None and backup.record["done"] for backup in kept] == [True, True]


@pytest.mark.process
@pytest.mark.nightly
def test_a_plain_script_on_parameter_servers(run_cluster, tmp_path):
    run = run_cluster("plain_keras.py", "servers", str(tmp_path), workers=1, ps=1, status=2)
    assert "tfmw.train_on_batch needs synchronous replicas" in run.output, "after fit and evaluate"


@pytest.mark.process
def test_a_plain_script_that_divides_its_data_is_refused(run_cluster, tmp_path):
    run = run_cluster("plain_keras.py", "own_shard", str(tmp_path), status=2)
    assert "workers have different datasets: an array is" in run.output
    assert "call keras.utils.set_random_seed(0)" in run.output
    assert "pass the same data on every worker" in run.output
    assert run.by_task == {}, "nobody trained"


ALONE = "each of the 2 workers has done all of it: in a loop of your own, call model.train_on_batch"


@pytest.mark.process
def test_a_script_that_shares_no_work_is_told_so_by_the_chief(run_cluster, tmp_path):
    run = run_cluster("plain_keras.py", "own_loop", str(tmp_path))
    assert run.output.count(ALONE) == 1


@pytest.mark.process
def test_with_keras_off_a_plain_fit_is_refused(run_cluster, tmp_path):
    run = run_cluster("plain_keras.py", "off", str(tmp_path), options=["--keras", "off"], status=2)
    assert "model.fit() was called in Cluster(" in run.output
    assert run.by_task == {}, "nobody trained"


class Halved(keras.Sequential):
    def fit(self, x: Any, y: Any, **rest: Any) -> Any:
        return super().fit(x / 2, y, **rest)


@pytest.mark.nightly
@pytest.mark.process
def test_a_plain_fit_trains_on_new_processes_with_data_prepared_once() -> None:
    def made() -> Any:
        keras.utils.set_random_seed(1)
        model = Halved([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-5), "mse")
        return model

    expected = made().fit(X, Y, batch_size=3, verbose=0).history
    with tfmw.options(workers=2):
        history = made().fit(X, Y, batch_size=3, verbose=0).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


# ---- which calls are tfmw's --------------------------------------------------------------------


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the calls that have reached tfmw, in a process whose methods are replaced."""
    noted: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            noted.append(name)
            return function(*args, **kwargs)

        note.__signature__ = plain_calls.inspect.signature(function)  # type: ignore[attr-defined]
        return note

    functions = {name: noting(name, f) for name, f in plain_calls._FUNCTIONS.items()}
    monkeypatch.setattr(plain_calls, "_FUNCTIONS", functions)
    model_methods.replace_methods(plain_calls.plain_call)
    yield noted
    model_methods.replace_methods(None)


def network() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-5), "mse")
    return model


def test_methods_of_a_plain_script_reach_tfmw_once(replaced: list[str]) -> None:
    model = prepared()  # has methods of its own
    model.fit(X, Y, verbose=0)
    assert replaced == ["fit", "evaluate"], "the class's fit evaluates"
    model.predict(X, verbose=0)
    model.train_on_batch(X[:3], Y[:3])
    model.test_on_batch(X[:3], Y[:3])
    assert replaced[2:] == ["predict", "train_on_batch", "test_on_batch"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'backup_dir'"):
        network().fit(X, Y, backup_dir="x")


class TrainsAnother(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        network().fit(X, Y, verbose=0)
        self.model.evaluate(X, Y, verbose=0)


def test_callbacks_train_on_all_workers_unless_the_chief_runs_them(replaced: list[str]) -> None:
    on_chief = TrainsAnother()
    on_chief.chief_only = True
    network().fit(X, Y, callbacks=[on_chief], verbose=0)
    assert replaced == ["fit"]
    network().fit(X, Y, callbacks=[TrainsAnother()], verbose=0)
    assert replaced == ["fit", "fit", "fit"], "another model's; evaluate is Keras's own"


def test_what_a_wrapper_calls_is_keras_own(
    replaced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's autologging predicts an example, on the chief alone."""
    own, ran = keras.Model.fit, []

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.predict(X[:2], verbose=0)
        ran.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(keras.Model, "fit", wrapper)
    network().fit(X, Y, verbose=0)
    assert (replaced, len(ran)) == (["fit"], 1)


def test_other_threads_have_keras_own_methods(replaced: list[str]) -> None:
    thread = threading.Thread(target=lambda: network().predict(X, verbose=0))
    thread.start()
    thread.join()
    assert replaced == []


def test_a_plain_call_is_named_as_the_script_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error on other workers, which make no such call, has this name."""
    found = []

    def noted(strategy: Any) -> Any:
        found.append(stacks.users_call(sys._getframe(1)).partition(" at ")[0])
        return tf.distribute.get_strategy()

    monkeypatch.setattr(strategies, "choose", noted)
    model = network()
    with tfmw.options():
        model.evaluate(X, Y, verbose=0)
    tfmw.evaluate(model, X, Y, verbose=0)
    assert set(found) == {"model.evaluate", "tfmw.evaluate"}


@pytest.mark.parametrize(
    ("file", "installed"),
    [
        ("/home/user/train.py", False),
        ("/tmp/ipykernel_7/1.py", False),
        ("<ipython-input-3-0a>", False),
        ("<stdin>", False),
        ("<frozen importlib._bootstrap>", True),
        ("<string>", True),
        ("/usr/lib/python3.11/threading.py", True),
        ("/usr/lib/python3/dist-packages/numpy/core.py", True),
        ("/opt/site-packages/keras/__init__.py", True),
        ("/tmp/__autograph_generated_file7.py", True),
        (tfmw.__file__, True),
    ],
)
def test_code_of_the_user_and_of_libraries(file: str, installed: bool) -> None:
    assert stacks.is_installed(file) is installed


def test_a_directory_of_backups_for_plain_calls_is_not_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BACKUP_DIR, str(tmp_path / "plain"))
    with pytest.raises(UsageError, match="received --backup-dir, which is for"):
        tfmw.fit(network(), X, Y, verbose=0)
    tfmw.fit(network(), X, Y, verbose=0, backup_dir=tmp_path / "own")
    assert (tmp_path / "own").exists()
    assert not (tmp_path / "plain").exists()


def test_options_are_arguments_that_keras_has_not() -> None:
    with (
        pytest.raises(UsageError, match=r"options received epochs: expected arguments that tfmw\."),
        tfmw.options(epochs=3),
    ):
        pass


# ---- backups of several calls ------------------------------------------------------------------


class Killed(BaseException):
    pass


class Stops(keras.callbacks.Callback):
    """Notes epochs, and ends the process in one if it is told to."""

    def __init__(self, note: Callable[[int], None], epoch: int | None):
        super().__init__()
        self.note = note  # a list would be restored with a backup
        self.stops_in = epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.note(epoch)
        if epoch == self.stops_in:
            raise Killed


class Script:
    """Two trainings of one model; each run of it is a process of its own.

    Attributes:
        epochs: those that each training has begun, in this run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._runs = 0

    def run(
        self,
        stops: int | None = None,
        *,
        skips: bool = False,
        rate: float = 1e-5,
        callbacks: tuple[Any, ...] = (),
    ) -> list[Any]:
        """The weights at the end; `stops`: the epoch of the second training that ends it."""
        self._runs += 1
        self._patch.setattr(resume, "_run", lambda: f"process {self._runs}")
        plain_calls._counts.clear()
        self.epochs: list[list[int]] = []
        model = network()
        model.optimizer.learning_rate = rate
        for number, (x, stop) in enumerate(((X, None), (X[::-1].copy(), stops))):
            if skips and number == 0:
                continue
            begun: list[int] = []
            self.epochs.append(begun)
            own = [Stops(begun.append, stop), *callbacks]
            model.fit(x, Y, epochs=3, verbose=0, callbacks=own)
        return [np.asarray(w) for w in model.get_weights()]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


@pytest.mark.parametrize("stops", [0, 2])
def test_a_restarted_script_continues_in_the_call_that_was_interrupted(
    script: Script, tmp_path: Path, stops: int
) -> None:
    expected = script.run()
    with tfmw.options(backup_dir=tmp_path):
        with pytest.raises(Killed):
            script.run(stops)
        got = script.run()
    assert script.epochs == [[], list(range(stops, 3))]
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_keras_own_backups_are_tfmws(script: Script, tmp_path: Path) -> None:
    expected = script.run()
    backups = (keras.callbacks.BackupAndRestore(tmp_path),)
    with tfmw.options():
        with pytest.raises(Killed):
            script.run(1, callbacks=backups)
        got = script.run(callbacks=backups)
    assert script.epochs == [[], [1, 2]]
    np.testing.assert_array_equal(got[0], expected[0])


def test_keras_own_backups_continue_in_the_next_call_after_an_error(tmp_path: Path) -> None:
    expected, model = network(), network()
    begun: list[int] = []
    expected.fit(X, Y, epochs=3, verbose=0)

    def fit(fails_in: int | None) -> None:
        callbacks = [keras.callbacks.BackupAndRestore(tmp_path), Stops(begun.append, fails_in)]
        model.fit(X, Y, epochs=3, verbose=0, callbacks=callbacks)

    with tfmw.options():
        with pytest.raises(Killed):
            fit(fails_in=1)
        fit(fails_in=None)
    assert begun == [0, 1, 1, 2]
    np.testing.assert_array_equal(model.get_weights()[0], expected.get_weights()[0])


@pytest.fixture(params=["directory", "bucket"])
def backups(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    with s3(monkeypatch) as server:
        yield str(tmp_path) if request.param == "directory" else f"{server.url}/backups"


def test_backups_belong_to_calls_with_the_same_model_optimizer_and_data(
    script: Script, backups: str, caplog: pytest.LogCaptureFixture
) -> None:
    with tfmw.options(backup_dir=backups), caplog.at_level(logging.WARNING, "tfmw"):
        with pytest.raises(Killed):
            script.run(2)
        assert "begins anew" not in caplog.text
        script.run(skips=True)
        assert script.epochs == [[2]], "the second training, though it is the first call"
        script.run(rate=2e-5)
    assert script.epochs == [[0, 1, 2], [0, 1, 2]]
    assert "is of this call of model.fit, which begins anew" in caplog.text
