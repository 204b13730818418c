"""The ring that gradients travel through: sums, and what happens when a worker goes."""

from __future__ import annotations

import contextlib
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.by_hand import ByHand
from tests.helpers.cases import cases, each
from tests.helpers.cluster import run_cluster
from tests.helpers.threads import Exchange, in_threads
from tfmw.cluster import sockets, wire
from tfmw.observe import recorder
from tfmw.train.mirrored.collectives import listener, ring, ring_links
from tfmw.train.mirrored.collectives.all_reduce import RingBroken, even_cuts
from tfmw.train.mirrored.collectives.ring import Ring
from tfmw.train.mirrored.replicas import Replicas

Array = np.ndarray[Any, Any]
KEY = b"k" * 32


def sums_of(rings: list[Ring], arrays: list[Array]) -> Callable[[int], Array]:
    return lambda rank: rings[rank].sum(arrays[rank].copy())


def gathers_of(rings: list[Ring], arrays: list[Any]) -> Callable[[int], list[Array]]:
    return lambda rank: rings[rank].gather(arrays[rank])


@pytest.fixture(params=["shared memory", "TCP"])
def over(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Transport of the ring's bytes."""
    monkeypatch.setenv(listener.SHARED_MEMORY, "0" if request.param == "TCP" else "1")
    return str(request.param)


@pytest.fixture
def joined(over: str) -> Iterator[Callable[..., list[Any]]]:
    """Joins rings that are closed afterwards: joined(3), or with a `from_all` of the test's own."""
    rings: list[Any] = []

    def join(
        size: int, change: Callable[[int, Any], Any] | None = None, **options: Any
    ) -> list[Any]:
        exchange = Exchange(size)

        def one(rank: int) -> Ring:
            from_all = exchange.of(rank)
            if change is not None:
                from_all = change(rank, from_all)
            hosts = ["127.0.0.1"] * size
            return ring.connect(rank, hosts, KEY, from_all, range(size), **options)

        results = in_threads(size, one)
        rings.extend(r for r in results if isinstance(r, Ring))
        return results

    yield join
    for one in rings:
        one.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_of_any_length_and_type(joined, size):
    rings = joined(size)
    random = np.random.default_rng(size)
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        for length in (0, 1, size - 1, 1000, 200_001):
            # Whole numbers, whose sums are exact in any order.
            arrays = [random.integers(-20, 20, length).astype(dtype) for _ in range(size)]
            for total in in_threads(size, sums_of(rings, arrays)):
                assert total.dtype == dtype
                np.testing.assert_array_equal(total, np.sum(arrays, axis=0).astype(dtype))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_in_place_are_the_same_to_the_last_bit(joined, size):
    rings = joined(size)
    for length in (0, 1, 1_000_003):
        arrays = [np.random.default_rng(r).normal(size=length).astype("f") for r in range(size)]
        sums = in_threads(size, sums_of(rings, arrays))
        cuts = even_cuts(length, size)

        def in_place(
            rank: int, arrays: list[Array] = arrays, cuts: list[int] = cuts
        ) -> tuple[Array, Array]:
            whole, half = arrays[rank].copy(), arrays[rank].copy()
            rings[rank].sum(whole)
            own = rings[rank].reduce_scatter(half, cuts)
            assert rings[rank].all_gather(own, cuts, half) is half
            return whole, half

        for total, gathered in in_threads(size, in_place):
            np.testing.assert_array_equal(total, sums[0])
            np.testing.assert_array_equal(gathered, sums[0])


def test_sums_are_bitwise_equal_on_all_workers(joined):
    rings = joined(3)
    arrays = [np.random.default_rng(r).normal(size=100_003).astype("f") for r in range(3)]
    sums = in_threads(3, sums_of(rings, arrays))
    assert len({total.tobytes() for total in sums}) == 1
    np.testing.assert_allclose(sums[0], np.sum(arrays, axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [100, 200_000])
def test_a_sum_of_two_values_that_are_no_numbers_has_the_same_bits_on_both(joined, length):
    rings = joined(2)
    arrays = [np.full(length, 0x7FC00001 + rank, np.uint32).view("f") for rank in range(2)]
    one, other = in_threads(2, sums_of(rings, arrays))
    assert np.isnan(one).all()
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 200_003])
def test_a_sum_in_two_halves_is_the_sum_to_the_last_bit(joined, size, length):
    rings = joined(size)
    arrays = [np.random.default_rng(r).normal(size=length).astype("f") for r in range(size)]
    cuts = even_cuts(length, size)

    def halves(rank: int) -> tuple[Array, Array]:
        own = rings[rank].reduce_scatter(arrays[rank].copy(), cuts).copy()
        return own, rings[rank].all_gather(own, cuts, np.empty(length, "f"))

    sums = in_threads(size, sums_of(rings, arrays))
    for rank, (own, total) in enumerate(in_threads(size, halves)):
        np.testing.assert_array_equal(own, sums[0][rings[rank].own_part(cuts)])
        np.testing.assert_array_equal(total, sums[0])
    assert rings[0].own_part(cuts) != rings[1].own_part(cuts) or length < 2


def test_parts_may_be_of_any_size(joined):
    rings = joined(3)
    cuts = [0, 0, 70_000, 70_001]
    arrays = [np.random.default_rng(r).integers(0, 9, 70_001).astype("f") for r in range(3)]

    total = np.sum(arrays, axis=0)

    def halves(rank: int) -> Array:
        own = rings[rank].reduce_scatter(arrays[rank], cuts)
        assert (
            rings[rank].own_part(cuts)
            == [slice(0, 70_000), slice(70_000, 70_001), slice(0, 0)][rank]
        )
        return rings[rank].all_gather(own, cuts, np.empty(cuts[-1], "f"))

    for gathered in in_threads(3, halves):
        np.testing.assert_array_equal(gathered, total)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 1_000_003])
def test_broadcast_of_one_workers_array(joined, size, length):
    rings = joined(size)
    for root in (0, 0, size - 1):
        arrays = [np.random.default_rng(r).integers(0, 256, length, np.uint8) for r in range(size)]
        expected = arrays[root].tobytes()
        found = in_threads(size, lambda r: rings[r].broadcast(arrays[r], root=root))  # noqa: B023
        assert [array.tobytes() for array in found] == [expected] * size
    sums = in_threads(size, sums_of(rings, [array.astype("f") for array in arrays]))
    np.testing.assert_array_equal(sums[0], sums[-1])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shift_has_the_arrays_of_the_previous_worker(joined, size):
    rings = joined(size)
    for lengths in ([3, 0, 5, 1], [0, 0, 0, 0], [1_000_003, 1, 2, 3]):
        arrays = [[np.full((2, n), r, "f"), np.arange(r)] for r, n in enumerate(lengths[:size])]

        def shifted(rank: int, own: Any = arrays) -> Any:
            return rings[rank].shift(own[rank])

        found = in_threads(size, shifted)
        for rank, values in enumerate(found):
            assert rings[rank].previous == (rank - 1) % size
            assert values.tobytes() == b"".join(a.tobytes() for a in arrays[rank - 1])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gather_is_ordered_by_rank(joined, size):
    rings = joined(size)
    for lengths in ([3, 0, 5, 1], [0, 0, 0, 0], [70_000, 1, 2, 3]):
        values: list[Array] = [np.full((lengths[r], 2), r, "f") for r in range(size)]
        indices: list[Array] = [np.arange(lengths[r], dtype=np.int64) for r in range(size)]

        mine = list(zip(values, indices, strict=True))
        gathered = in_threads(size, gathers_of(rings, mine))
        for everyones_values, everyones_indices in gathered:
            np.testing.assert_array_equal(everyones_values, np.concatenate(values))
            np.testing.assert_array_equal(everyones_indices, np.concatenate(indices))
            assert everyones_indices.dtype == np.int64


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_lost_worker_ends_the_sums_of_all(joined, leaver):
    rings = joined(3)
    large: Array = np.ones(4_000_000, "f")

    def work(rank: int) -> Any:
        if rank == leaver:
            return rings[rank].close()
        return rings[rank].sum(large.copy())

    results = in_threads(3, work)
    for rank, result in enumerate(results):
        if rank != leaver:
            assert isinstance(result, RingBroken)
    assert any(f"lost worker {leaver}" in str(r) for r in results)
    with pytest.raises(RingBroken):
        rings[leaver - 1].sum(large)


def test_data_sent_before_the_end_of_a_worker_counts(joined):
    rings = joined(2)
    ones: Array = np.ones(200_000, "f")  # more than two workers exchange whole
    has_left = threading.Event()
    takes = []
    take = rings[1]._previous.take

    def late(into: Array) -> Array | None:
        takes.append(into)
        assert len(takes) < 3 or has_left.wait(20)  # after the header and the first half
        taken: Array | None = take(into)
        while taken is None and len(takes) < 3:
            taken = take(into)
        return taken

    rings[1]._previous.take = late

    def work(rank: int) -> Any:
        total = rings[rank].sum(ones.copy())
        if rank == 0:
            rings[0].close()
            has_left.set()
        return total

    np.testing.assert_array_equal(in_threads(2, work), np.full([2, 200_000], 2))
    assert len(takes) == 3


def test_each_sum_is_of_its_own_round(joined):
    """No sum belongs to an earlier round, whether the caller keeps results or not."""
    rings = joined(2)

    def rounds(rank: int) -> list[float]:
        firsts, kept = [], []
        for number in range(8):
            total = rings[rank].sum(np.full(1000, 10.0**rank * number, "f"))
            firsts.append(float(total[0]))
            assert (total == total[0]).all()
            if number % 3 == 0:
                kept.append(total)
        assert [float(total[0]) for total in kept] == firsts[::3]
        return firsts

    expected = [11.0 * number for number in range(8)]
    assert in_threads(2, rounds) == [expected, expected]


@pytest.mark.parametrize("exchange", ["sum", "gather", "broadcast"])
def test_workers_in_different_exchanges_fail(joined, exchange):
    """The arrays have the same length, so that only the number of the ring operation differs."""
    rings = joined(2)
    rings[1].exchanges += 1  # as of a worker that has made one exchange more
    values: Array = np.ones(10, "f")
    results = in_threads(
        2, lambda rank: getattr(rings[rank], exchange)([values] if exchange == "gather" else values)
    )
    errors = [r for r in results if isinstance(r, RuntimeError)]
    assert any(re.search("worker 0 exchange 0 .*, worker 1 exchange 1", str(e)) for e in errors), (
        results
    )
    if exchange != "broadcast":  # of which the first worker only sends
        assert all(isinstance(r, RuntimeError | RingBroken) for r in results)


def test_workers_that_sum_different_arrays_of_one_length_fail(joined):
    rings = joined(2)
    values: Array = np.ones(10, "f")
    whats = ["gradients", "metrics"]
    results = in_threads(2, lambda rank: rings[rank].sum(values, what=whats[rank]))
    expected = r"worker 0 exchange 0 \(gradients\), worker 1 exchange 0 \(metrics\)"
    assert any(re.search(expected, str(r)) for r in results), results
    assert all(isinstance(r, RuntimeError | RingBroken) for r in results)


def test_workers_that_sum_arrays_of_different_lengths_fail(joined):
    rings = joined(2)
    results = in_threads(2, lambda rank: rings[rank].sum(np.ones(10 + rank, "f")))
    assert any("worker 0 40 bytes, worker 1 44 bytes" in str(r) for r in results), results
    assert all(isinstance(r, RuntimeError | RingBroken) for r in results)


def test_a_ring_that_is_connected_anew_keeps_its_methods(joined):
    rings, size = joined(3), 3
    sums = [one.sum for one in rings]  # as in a traced step
    rings[1].close()
    for rank in (0, 2):
        with pytest.raises(RingBroken):
            sums[rank](np.ones(5))
    for one, new in zip(rings, joined(size), strict=True):
        one.continue_over(new)
    totals = in_threads(size, lambda rank: sums[rank](np.full(5, rank + 1.0)))
    np.testing.assert_array_equal(totals, np.full((size, 5), 6.0))


def test_silent_neighbour_is_waited_for_until_the_timeout(joined):
    rings = joined(2, timeout_s=0.3)
    with pytest.raises(RingBroken, match="no value was sent or received"):
        rings[0].sum(np.ones(10, "f"))


@pytest.mark.parametrize("raised", [RingBroken("lost worker 1"), tf.errors.UnknownError(0, 0, "")])
def test_the_lost_worker_is_named_though_the_ring_was_closed_first(raised):
    """A thread closes the ring once it knows of the loss, and the exchange fails by itself."""
    replicas = object.__new__(Replicas)
    lost = tf.errors.UnavailableError(None, None, "worker 1 was lost")
    group: Any = SimpleNamespace(shared_call=contextlib.nullcontext, root_cause=lambda found: lost)
    replicas.group, transport = group, SimpleNamespace(ring=SimpleNamespace(broken=None))
    replicas.transport = transport  # type: ignore[assignment]
    transport.ring.broken = RingBroken("this worker has closed the ring")
    named = pytest.raises(tf.errors.UnavailableError, match="worker 1 was lost")
    with named, replicas.lost_peer_named():
        raise raised


def test_a_waiting_worker_sleeps_until_its_ring_is_closed(joined, monkeypatch):
    """Another thread closes the ring once a worker is lost, even one that keeps its connections."""
    taken: dict[int, int] = {0: 0, 2: 0}
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(recorder, "waits_for", waiting.put)
    rings = joined(3)

    def work(rank: int) -> Any:
        if rank == 1:  # takes no part
            waits: set[int] = set()
            while len(waits) < 2:
                waits.add(waiting.get(timeout=120))
            for each in (0, 2):
                rings[each].close()
            return waits
        take = rings[rank]._previous.take

        def counted(into: Array) -> Array | None:
            taken[rank] += 1
            came: Array | None = take(into)
            return came

        monkeypatch.setattr(rings[rank]._previous, "take", counted)
        return rings[rank].sum(np.ones(10, "f"))

    first, waits, last = in_threads(3, work)
    assert {type(first), type(last)} == {RingBroken}
    assert waits == {1, 2}  # each of them for the worker before it
    assert max(taken.values()) < 20


def to(address: Any, over: str) -> socket.socket:
    """A connection to a worker."""
    if over == "TCP":
        return socket.create_connection(("127.0.0.1", address["port"]))
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(f"\0{address['name']}")
    return peer


def test_connections_without_the_key_are_rejected(joined, over):
    """A client without the key is not taken for a worker, even if it connects first."""
    strangers = []

    def with_stranger(rank: int, from_all: Any) -> Any:
        def change(value: Any) -> list[Any]:
            if isinstance(value, dict):  # the address
                stranger = to(value, over)
                stranger.sendall(b"x" * 64)  # a nonce and a proof
                strangers.append(stranger)
            return from_all(value)

        return change

    rings = joined(2, with_stranger)
    sums = in_threads(2, lambda rank: rings[rank].sum(np.full(5, rank + 1, "f")))
    np.testing.assert_array_equal(sums, np.full([2, 5], 3))
    for stranger in strangers:
        assert_closed(stranger)
        stranger.close()


def received(peer: socket.socket, size: int) -> bytes:
    """The next `size` bytes."""
    data = b""
    while len(data) < size:
        data += peer.recv(size - len(data))
    return data


def assert_closed(stranger: socket.socket) -> None:
    """The other side closes a connection after its nonce and its proof."""
    stranger.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(100):
            pass


@pytest.fixture
def opened(over: str) -> Iterator[listener.Listener]:
    """A worker that waits for the one before."""
    with contextlib.closing(listener.Listener("127.0.0.1", KEY)) as opened:
        yield opened


def test_silent_connections_do_not_add_up_their_timeouts(opened, over, monkeypatch):
    monkeypatch.setattr(listener, "CONNECT_S", 2.0)
    with contextlib.ExitStack() as stack:
        for _ in range(400):  # one after the other they would take longer than a test may
            stack.enter_context(to(opened.address, over))
        with pytest.raises(TimeoutError):
            opened.accept(opened.address)


def test_slow_connections_do_not_delay_workers(opened, over):
    """More of them than are read side by side, and all were there first."""
    ended = threading.Event()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(to(opened.address, over)) for _ in range(70)]

        def dribble() -> None:
            while not ended.wait(0.05):
                for stranger in strangers:
                    with contextlib.suppress(OSError):
                        stranger.send(b"x")

        thread = threading.Thread(target=dribble)
        thread.start()
        try:
            results = in_threads(
                2,
                lambda rank: (
                    listener.connect("127.0.0.1", opened.address, opened.address, KEY)
                    if rank
                    else opened.accept(opened.address)
                ),
            )
        finally:
            ended.set()
            thread.join()
    assert isinstance(results[0], ring_links.Receiver), results
    assert isinstance(results[1], ring_links.Sender), results
    results[0].peer.close()
    results[1].peer.close()


def test_incomplete_hello_is_closed_after_the_timeout(opened, over, monkeypatch):
    monkeypatch.setattr(listener, "CONNECT_S", 30.0)
    monkeypatch.setattr(wire, "HELLO_S", 0.1)

    def work(rank: int) -> Any:
        if rank == 0:
            return opened.accept(opened.address)
        with to(opened.address, over) as stranger:
            stranger.send(b"x")
            assert_closed(stranger)  # and only then the worker comes
        return listener.connect("127.0.0.1", opened.address, opened.address, KEY)

    links_made = in_threads(2, work)
    for link in links_made:
        assert isinstance(link, ring_links.Receiver | ring_links.Sender)
        link.peer.close()


def test_key_is_never_sent_and_a_proof_is_for_one_connection(monkeypatch):
    monkeypatch.setenv(listener.SHARED_MEMORY, "0")
    monkeypatch.setattr(listener, "CONNECT_S", 0.5)
    with (
        contextlib.closing(listener.Listener("127.0.0.1", KEY)) as real,
        socket.create_server(("127.0.0.1", 0)) as false,
    ):

        def listen(rank: int) -> Any:
            if rank == 0:
                address: Any = {**real.address, "port": false.getsockname()[1]}
                return listener.connect("127.0.0.1", address, real.address, KEY)
            peer, _address = false.accept()
            with peer:
                peer.sendall(b"n" * 32)
                return received(peer, 64)

        error, sent = in_threads(2, listen)
        assert isinstance(error, OSError)
        assert KEY not in sent
        with to(real.address, "TCP") as stranger:
            stranger.sendall(sent)
            with pytest.raises(TimeoutError, match=r"1 connection\(s\) without .* TFMW_TOKEN"):
                real.accept(real.address)


def test_a_server_without_the_key_gets_no_values(monkeypatch):
    monkeypatch.setenv(listener.SHARED_MEMORY, "0")
    with (
        contextlib.closing(listener.Listener("127.0.0.1", b"another key")) as other,
        pytest.raises(wire.NotAMember, match="does not know this training's TFMW_TOKEN"),
    ):
        listener.connect("127.0.0.1", other.address, other.address, KEY)


def test_workers_of_one_machine_share_memory_and_others_use_tcp(joined, over):
    """The last of three is elsewhere."""

    def last_elsewhere(rank: int, from_all: Any) -> Any:
        def change(value: Any) -> list[Any]:
            if rank == 2 and isinstance(value, dict):
                value["machine"] = ["elsewhere", 0]
            return from_all(value)

        return change

    rings = joined(3, last_elsewhere)
    kinds = [(type(r._next), type(r._previous)) for r in rings]
    out, into = ring_links.Sender, ring_links.Receiver
    if over == "TCP":
        assert kinds == [(out, into)] * 3
    else:
        shared_out, shared_into = ring_links.SharedSender, ring_links.SharedReceiver
        assert kinds == [(shared_out, into), (out, shared_into), (out, into)]
    arrays: list[Array] = [np.full(500_000, rank, "f") for rank in range(3)]
    np.testing.assert_array_equal(in_threads(3, sums_of(rings, arrays)), np.full([3, 500_000], 3))
    mine = [[array[: 200_000 * rank]] for rank, array in enumerate(arrays)]
    for (rows,) in in_threads(3, gathers_of(rings, mine)):
        np.testing.assert_array_equal(rows, np.repeat([1.0, 2.0], [200_000, 400_000]))


def test_infinities_are_summed_without_a_warning(joined):
    rings = joined(2)
    sums = in_threads(2, lambda rank: rings[rank].sum(np.full(3, [-np.inf, np.inf][rank], "f")))
    assert np.isnan(sums).all()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_worker_is_reached_by_address_and_by_name(host):
    with sockets.listen(host) as server:
        with socket.create_connection((host, server.getsockname()[1]), timeout=5):
            server.accept()[0].close()
        only_there = server.getsockname()[0] == host
    assert only_there == (host != "localhost")


def test_unreachable_neighbours_are_named_on_all_workers(joined, monkeypatch):
    monkeypatch.setattr(listener, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]

    def cut(rank: int, from_all: Any) -> Any:
        def change(value: Any) -> list[Any]:
            values = from_all(value)
            if isinstance(value, dict):
                values[1] = {**values[1], "port": nobody, "name": "nobody"}
            return values

        return change

    for result in joined(2, cut):
        assert isinstance(result, RingBroken)
        assert f"worker 0 could not connect to worker 1 at 127.0.0.1:{nobody} (" in str(result)
        assert "refused" in str(result)
        assert "worker 0 did not connect to worker 1 (timed out)" in str(result)


@pytest.mark.process
def test_a_worker_whose_data_ends_early_is_an_error_and_not_a_hang():
    run = run_cluster("shards_differ.py", status=1)
    expected = r"worker 0 exchange \d+ \(gradients\), worker 1 exchange \d+ \(metrics\)"
    assert re.search(expected, run.output), run.output


def trained_over(way: str) -> list[dict[str, Any]]:
    return list(run_cluster("over_ring.py", way, env={"TFMW_NO_INIT": "1"}))


@pytest.fixture(scope="module")
def tasks() -> list[dict[str, Any]]:
    return trained_over("auto")


@pytest.fixture(scope="module")
def over_grpc() -> list[dict[str, Any]]:
    """The same over the collectives of TensorFlow."""
    return trained_over("grpc")


@pytest.fixture(params=cases(["tasks"], ["over_grpc"]))
def either(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = request.getfixturevalue(request.param)
    return found


@pytest.mark.process
class TestTraining:
    def test_gradients_use_the_ring_by_default(self, tasks):
        for task in each(tasks):
            # 5 batches of 2 epochs: one pack of dense gradients, and the embedding's rows.
            for over, link in (("over TCP", "Sender"), ("over", "SharedSender")):
                assert task[over]["exchanges"] == 2 * 5 * 2
                assert task[over]["links"] == link
                assert task[over]["weights"] == task["over"]["weights"]

    @pytest.mark.nightly
    def test_results_equal_those_of_tensorflows_collectives(self, tasks, over_grpc):
        for task, other in zip(tasks, each(over_grpc), strict=True):
            assert task["over"]["weights"] == other["over"]["weights"]
            assert task["called by users"] == other["called by users"]
            assert task["agreed"] == other["agreed"]
            # The traces of one of them are older: of an evaluation before the training.
            again = (each["trained again"]["weights"] for each in (task, other))
            for got, expected in zip(*again, strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

    def test_the_weights_are_those_of_one_process(self, tasks):
        """Every update is of its own step's gradients, over all workers."""
        alone = tasks[0]["alone"]["values"]
        for task in each(tasks):
            for got, expected in zip(task["over"]["values"], alone, strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)

    def test_workers_with_different_weights_take_the_chiefs(self, either):
        for task in each(either):
            assert task["begun apart"]["weights"] == task["over"]["weights"]

    def test_only_what_differs_travels(self, tasks):
        for task in each(tasks):  # beside gradients: the embedding and the kernel
            assert task["begun apart"]["exchanges"] == task["over"]["exchanges"] + 2

    def test_only_values_that_differ_are_replaced_by_the_chiefs(self, either):
        types = ["float32", "float64", "bfloat16", "int64", "bool", "uint8"]
        assert [task["agreed"]["different"] for task in either] == [types, types]
        assert either[0]["agreed"] == either[1]["agreed"]

    def test_a_worker_traces_alone_over_the_ring_and_with_the_others_else(self, either):
        """The last call of worker 1 is with another `compile`."""
        alone = either[0]["over"]["exchanges"] > 0
        for rank, task in enumerate(each(either)):
            first, second, third = task["called again"]
            assert first[0] == second[0] == third[0]
            assert second[1] == 0
            assert (third[1] > 0) == (rank == 1 or not alone)

    def test_training_continues_in_cached_traces(self, either):
        """Traces stay valid after evaluations and between them, over either ring."""
        first, *others = (task["trained again"]["weights"] for task in either)
        for weights in each(others):
            for got, expected in zip(weights, first, strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

    def test_an_evaluation_within_a_call_leaves_each_replica_its_random_state(self, either):
        states = [task["trained again"]["states"] for task in either]
        for before, after in (state[i : i + 2] for state in states for i in (0, 2)):
            assert before == after
        assert states[0] != states[1]

    def test_calls_of_tf_distribute_have_the_results_of_tensorflows_strategy(self, either):
        for task in each(either):
            assert task["called by users"]["replicas"] == 2
            assert task["called by users"]["sum"] == [3.0, 7.5]
            assert task["called by users"]["begun"] == [1.0, 2.5], "the chief's value"

    def test_workers_listen_on_no_port(self, tasks):
        assert [task["listening"] for task in tasks] == [0, 0]

    def test_16_bits_are_the_same_on_all(self, tasks):
        assert tasks[0]["16 bits"] == tasks[1]["16 bits"]
        assert tasks[0]["16 bits"]["weights"] != tasks[0]["over"]["weights"]

    @pytest.mark.nightly
    def test_tensorflows_collectives_use_no_ring(self, over_grpc):
        assert [task["over"]["exchanges"] for task in over_grpc] == [0, 0]


@pytest.mark.process
def test_unconnected_workers_are_an_error_that_says_what_to_do():
    run = run_cluster("over_ring.py", "refused", env={"TFMW_NO_INIT": "1"}, status=1)
    assert "worker 1 could not connect to worker 0 at" in run.output
    assert "(nobody listens here)" in run.output
    assert 'or choose collectives="grpc"' in run.output


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "error", "how"),
    [
        # Nothing closes the connections of a task that is frozen.
        ("freeze", "UnavailableError|/job:worker/replica:0/task:0", ()),
        pytest.param("kill", "UnavailableError", (), marks=pytest.mark.nightly),
        pytest.param("kill", "UnavailableError", ("eagerly",), marks=pytest.mark.nightly),
        pytest.param(
            *("break", "Error reported from .*ValueError: told to break", ()),
            marks=pytest.mark.nightly,
        ),
    ],
)
@pytest.mark.nightly
def test_lost_worker_is_detected_without_a_launcher(tmp_path, end, error, how):
    (tmp_path / "cut").touch()
    arguments = [tmp_path / "backups", tmp_path / "cut", *how]
    with ByHand("train_long.py", workers=1, ps=0, arguments=arguments) as cluster:
        cluster.tasks["worker 0"].wait_for("epoch 4\n")
        if end == "break":
            (tmp_path / "break").touch()
        else:
            getattr(cluster.tasks["worker 0"], end)()
        assert cluster.chief.end() == 1
        last = cluster.chief.output.partition("Traceback")[2]
        assert re.search(error, last), cluster.chief.output
