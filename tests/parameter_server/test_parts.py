"""Parts of parameter-server training that need no cluster: refusals, data of each worker."""

from __future__ import annotations

import inspect
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmw
from tests.helpers.by_hand import free_addresses
from tfmw import Cluster, ClusterError, TaskFailed, TfmwError, UsageError, data
from tfmw.cluster import servers as ps_cluster
from tfmw.cluster.servers import SILENCE_S, ControlServer, ServerSettings, wait_for_end
from tfmw.train.arguments import FitArguments
from tfmw.train.checkpoint import compatibility, evaluator, state
from tfmw.train.checkpoint.store import BackupStore
from tfmw.train.fit_context import FitContext
from tfmw.train.pace import FunctionPace
from tfmw.train.parameter_server.ps_training import ParameterServerTraining
from tfmw.train.parameter_server.variables import refuse_unsupported
from tfmw.train.parameter_server.worker_data import for_workers

FACTS = {"tensorflow": "2.21.0"}


# ---- the control connections ------------------------------------------------------------------


def cluster(task, index=0, addresses=None):
    chief, worker, server = addresses
    return Cluster(workers=(worker,), ps=(server,), chief=(chief,), task=task, index=index)


@pytest.fixture
def addresses():
    return free_addresses(3)


def in_thread(call):
    """(thread, [what it raised])."""
    raised: list[BaseException] = []

    def run():
        try:
            call()
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def servers(addresses, facts=FACTS, **options):
    return [
        in_thread(lambda task=task: wait_for_end(cluster(task, 0, addresses), facts, **options))
        for task in ("ps", "worker")
    ]


def end_process(control):
    """Closes all connections of a coordinator, as the end of its process would."""
    control._server.close()
    with control._changed:
        control._is_over = True
        channels = list(control._servers.values())
        control._servers.clear()
        control._changed.notify_all()
    for channel in channels:
        channel.close()


def joined(threads):
    for thread, _ in threads:
        thread.join(10)
        assert not thread.is_alive()
    return [raised for _, raised in threads]


def test_servers_end_with_the_coordinator(addresses):
    threads = servers(addresses)
    control = ControlServer(cluster("chief", 0, addresses), FACTS)
    control.wait_for_all(10)
    assert set(control._servers) == {"ps 0", "worker 0"}
    control.finish()
    end_process(control)
    assert joined(threads) == [[], []]


def test_servers_outlive_a_dead_coordinator_and_serve_the_next(addresses):
    threads = servers(addresses)
    first = ControlServer(cluster("chief", 0, addresses), FACTS)
    first.wait_for_all(10)
    end_process(first)  # without a word
    second = ControlServer(cluster("chief", 0, addresses), FACTS)
    second.wait_for_all(10)
    second.finish()
    end_process(second)
    assert joined(threads) == [[], []]


def test_existing_servers_serve_one_training_after_another(addresses):
    threads = servers(addresses, serve_again=True)
    for _ in range(2):
        control = ControlServer(cluster("chief", 0, addresses), FACTS)
        control.wait_for_all(10)
        control.finish()
        end_process(control)
    assert all(thread.is_alive() for thread, _ in threads)


def test_the_silence_of_tensorflows_connections_is_limited(addresses):
    threads = servers(addresses)
    control = ControlServer(cluster("chief", 0, addresses), FACTS)
    host, _, port = addresses[1].rpartition(":")  # where a worker's gRPC listens
    with socket.create_server((host, int(port))):
        control.wait_for_all(10)
        with socket.create_connection((host, int(port))) as connection:  # later than theirs
            deadline = time.monotonic() + 60
            while not connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):
                assert time.monotonic() < deadline
                threading.Event().wait(0.05)
            limit_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit_ms == SILENCE_S * 1000
    control.finish()
    end_process(control)
    assert joined(threads) == [[], []]


def test_failed_coordinator_sends_its_error(addresses):
    threads = servers(addresses)
    control = ControlServer(cluster("chief", 0, addresses), FACTS)
    control.wait_for_all(10)
    control.finish("ValueError: bad model")
    end_process(control)
    for (error,) in joined(threads):
        assert isinstance(error, TaskFailed)
        assert "bad model" in str(error)


def test_other_versions_are_refused_on_both_sides(addresses):
    threads = servers(addresses, {"tensorflow": "2.20.0"})
    control = ControlServer(cluster("chief", 0, addresses), FACTS)
    with pytest.raises(ClusterError, match=r"disagree about tensorflow.*2\.21\.0.*2\.20\.0"):
        control.wait_for_all(10)
    for (error,) in joined(threads):
        assert isinstance(error, ClusterError)
    end_process(control)


def test_missing_server_is_named(addresses):
    control = ControlServer(cluster("chief", 0, addresses), FACTS)
    thread = in_thread(lambda: wait_for_end(cluster("ps", 0, addresses), FACTS))
    with pytest.raises(TfmwError, match=r"worker 0 \(.*\) did not connect within 0.5 s"):
        control.wait_for_all(0.5)
    control.finish()
    end_process(control)
    assert joined([thread]) == [[]]


def test_wait_for_the_coordinator_has_a_timeout(addresses):
    with pytest.raises(TfmwError, match=r"ps 0 could not reach the coordinator.*waited 0.3 s"):
        wait_for_end(cluster("ps", 0, addresses), FACTS, patience_s=0.3)


# ---- what is refused ----------------------------------------------------------------------------


def small_model(optimizer="sgd"):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def training_on(x, y=None, *, aggregated=None, **given):
    """A training that does not start."""
    model = small_model()
    given = {"model": model, "x": x, "y": y, **given}
    parameters = inspect.signature(tfmw.fit).parameters.items()
    defaults = {n: p.default for n, p in parameters if p.kind is not p.VAR_KEYWORD}
    servers = SimpleNamespace(settings=ServerSettings(replicas_to_aggregate=aggregated))
    return ParameterServerTraining(
        FitContext.of(model, tf.distribute.get_strategy(), "fit"),
        FitArguments(**{**defaults, **given}, given=frozenset(given)),
        cast(Any, servers),
        None,
    )


def test_an_epoch_has_as_many_updates_as_take_all_batches():
    x, y = np.zeros([50, 2]), np.zeros(50)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    assert training_on(x, y, batch_size=7).steps_per_epoch == 8
    assert training_on(x, y).steps_per_epoch == 2
    assert training_on(batches).steps_per_epoch == 7
    assert training_on(batches, steps_per_epoch=20).steps_per_epoch == 20
    assert training_on(batches, aggregated=2).steps_per_epoch == 4, "two batches for an update"


@pytest.mark.parametrize("change", ["filter", "repeat", "function"])
def test_steps_per_epoch_is_required_for_data_of_unknown_length(change):
    data = tf.data.Dataset.from_tensor_slices((np.zeros([50, 2]), np.zeros(50))).batch(8)
    x = {
        "filter": data.filter(lambda x, y: True),
        "repeat": data.repeat(),
        "function": lambda context: data,
    }[change]
    with pytest.raises(UsageError, match=r"steps_per_epoch was not given.*examples // batch_size"):
        training_on(x)


@pytest.mark.parametrize(
    ("optimizer", "divided", "said"),
    [
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), False, "LossScaleOptimizer"),
        (keras.optimizers.SGD(gradient_accumulation_steps=2), False, "gradient_accumulation"),
        (keras.optimizers.SGD(use_ema=True), False, "use_ema"),
        (keras.optimizers.Nadam(), True, "row by row: expected SGD, Adagrad,.*Ftrl or Lion"),
    ],
)
def test_unsupported_optimizers_are_refused(optimizer, divided, said):
    table = keras.Variable(np.zeros([4, 2]), name="table")
    with pytest.raises(UsageError, match=said):
        refuse_unsupported([optimizer], [table] if divided else [])


def test_constraint_of_a_divided_variable_is_refused():
    table = keras.Variable(np.zeros([4, 2]), name="table")
    table.constraint = keras.constraints.NonNeg()
    with pytest.raises(
        UsageError, match=r"table is divided.*constraint \(NonNeg\).*all of its rows"
    ):
        refuse_unsupported([keras.optimizers.SGD()], [table])


def test_python_code_in_a_dataset_is_refused():
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([np.zeros([1, 2])]), output_signature=tf.TensorSpec([1, 2])
    )
    with pytest.raises(UsageError, match="runs Python code"):
        for_workers(data.Source(dataset), 2)


def test_an_empty_dataset_is_refused():
    with pytest.raises(UsageError, match="empty"):
        for_workers(data.Source(tf.data.Dataset.range(4).batch(2).take(0)), 2)


@pytest.mark.parametrize(
    ("arguments", "shape", "pieces"),
    [
        ((None, None), [1000, 8], 1),
        ((None, 16000), [1000, 8], 2),  # 32,000 bytes
        ((None, 16001), [1000, 8], 1),
        ((None, 1), [1000, 8], 4),  # servers
        ((None, 1), [3, 8], 3),
        ((None, 1), [], 1),
        ((lambda shape, dtype: [3, 1], None), [1000, 8], 3),
    ],
)
def test_partition_of_a_variable(arguments, shape, pieces):
    partitioner, min_shard_bytes = arguments
    divided = ps_cluster.partition_of(partitioner, min_shard_bytes, 4)
    assert divided(shape, tf.float32) == pieces


def test_partitioner_divides_the_first_axis_only():
    partition = ps_cluster.partition_of(lambda shape, dtype: [1, 2], None, 4)
    with pytest.raises(UsageError, match="first axis"):
        partition([4, 4], tf.float32)
    with pytest.raises(UsageError, match="both"):
        ps_cluster.partition_of(lambda shape, dtype: [1], 5, 4)


# ---- how many steps a function makes ------------------------------------------------------------


def test_functions_are_as_long_as_two_seconds_of_steps():
    pace, each, lengths = FunctionPace(1), 1 / 64, []
    for _ in range(5):
        lengths.append(pace.next_steps(100_000, 2))
        pace.took(each * lengths[-1], lengths[-1])
    assert lengths == [1, 8, 64, 128, 128]
    # Towards the end in smaller ones, after which the next epoch begins with whole ones.
    assert [pace.next_steps(left, 2) for left in (200, 100, 20, 1)] == [50, 32, 10, 1]
    pace.took(each, 1)
    pace.took(0.0, 0)  # found its tickets taken
    assert pace.next_steps(100_000, 2) == 128


def test_functions_have_whole_turns_of_the_traced_loop():
    pace = FunctionPace(1, unrolled=10)
    for _ in range(4):
        pace.took(2.0, 37)
    assert [pace.next_steps(left, 2) for left in (100_000, 60, 19, 9)] == [30, 10, 9, 5]


def test_each_worker_has_a_part_of_an_epoch_of_quick_steps():
    pace = FunctionPace(1)
    while pace.next_steps(100_000, 2) < 1000:
        pace.took(1e-6 * pace.next_steps(100_000, 2), pace.next_steps(100_000, 2))
    assert pace.next_steps(50, 2) == 31
    assert pace.next_steps(2000, 4) == 250


def test_steps_per_execution_is_used_unchanged():
    pace = FunctionPace(7)
    pace.took(100.0, 7)
    assert [pace.next_steps(left, 2) for left in (100, 3)] == [7, 3]


# ---- who reads what -----------------------------------------------------------------------------


def first_batches(source, workers, count=6):
    makers, _ = for_workers(source, workers)
    return [[b.numpy().tolist() for b in make().take(count)] for make in makers]


def test_each_worker_reads_all_data_from_its_own_offset():
    dataset = tf.data.Dataset.range(12).batch(2)
    first, second = first_batches(data.Source(dataset), 2)
    assert first == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert second == [[6, 7], [8, 9], [10, 11], [0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("seed", [None, 5])
def test_each_worker_shuffles_in_its_own_order(seed):
    dataset = tf.data.Dataset.range(100).shuffle(100, seed=seed).batch(10)
    first, second = first_batches(data.Source(dataset), 2, 10)
    assert first != second
    assert sorted(np.ravel(first)) == sorted(np.ravel(second)) == list(range(100))


def test_a_seeded_order_is_the_same_every_time():
    dataset = tf.data.Dataset.range(100).shuffle(100, seed=5).batch(10)
    assert first_batches(data.Source(dataset), 2) == first_batches(data.Source(dataset), 2)


def test_a_function_gets_the_number_of_its_worker():
    def read(context):
        return (
            tf.data.Dataset.range(6)
            .shard(context.num_input_pipelines, context.input_pipeline_id)
            .batch(3)
        )

    assert first_batches(data.Source(read), 2, 2) == [[[0, 2, 4]] * 2, [[1, 3, 5]] * 2]


def test_arrays_are_shuffled_differently_on_each_worker():
    source = data.Source(np.arange(40), batch_size=10, shuffle=True)
    keras.utils.set_random_seed(3)
    makers, _ = for_workers(source, 2)
    first, second = (
        [tf.nest.flatten(b)[0].numpy().tolist() for b in make().take(4)] for make in makers
    )
    assert first != second
    assert sorted(np.ravel(first)) == sorted(np.ravel(second)) == list(range(40))


# ---- which backup the evaluator exports ---------------------------------------------------------


@pytest.mark.parametrize("scores", [[0.5, 0.3, 0.4], [float("nan"), 0.3, float("nan")]])
def test_evaluator_exports_the_best_backup_not_the_last(tmp_path, scores):
    model = small_model()
    store = BackupStore(tmp_path)
    to_come = list(enumerate(scores))

    def next_backup(seconds):
        """Writes a backup while the evaluator sleeps; its bias is its number."""
        number, _ = to_come.pop(0)
        model.layers[0].bias.assign([float(number)])
        tensors = state.Snapshots().take(model, tf.distribute.get_strategy())
        record = {"done": not to_come, "signature": compatibility.signature(model, None)}
        model.layers[0].bias.assign([-1.0])
        store.write(number, tensors, record)

    evaluated = iter(scores)
    history = evaluator.watch(model, lambda: {"loss": next(evaluated)}, tmp_path, sleep=next_backup)
    assert history.epoch == [0, 1, 2]
    best = tf.saved_model.load(str(tmp_path / "best"))
    assert best.serve(tf.zeros([1, 2])).numpy() == [[1.0]]
    assert model.layers[0].bias.numpy() == [2.0], "the last that was evaluated"
    assert not store.steps()


# ---- backups during the training -------------------------------------------------------


def test_snapshot_is_unchanged_by_training_and_allocates_once():
    model = keras.Sequential([keras.Input((600,)), keras.layers.Dense(600), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    snapshots, strategy = state.Snapshots(), tf.distribute.get_strategy()
    kernel = next(name for name in state.named(model) if name.endswith("kernel"))
    places = []
    for value in (1.0, 2.0, 3.0):
        for variable in model.variables:
            variable.assign(tf.fill(variable.shape, value))
        taken = snapshots.take(model, strategy)
        for variable in model.variables:
            variable.assign_add(tf.ones(variable.shape))
        for name, variable in state.named(model).items():
            if any(variable is v for v in model.variables):
                np.testing.assert_array_equal(taken[name], np.full(variable.shape, value))
        places.append(np.asarray(memoryview(taken[kernel])).ctypes.data)
    assert len(set(places)) == 1
