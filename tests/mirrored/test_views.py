"""Every interleaving of deaths and messages of three workers, while steps and views change.

The explorer walks through all states that the workers can reach. A worker may die in each of them,
and messages that it has sent may arrive or be lost. Workers have the whole state, or each has its
own shard of it and that of the worker before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from tfmw.train.mirrored.state_copies import Held, Layout, continued

SIZE = 3


class View(NamedTuple):
    """A set of connections between all workers."""

    number: int
    # Ranks of the workers whose copies together are the state that all take; none: there is none.
    senders: tuple[int, ...]
    step: int  # step of that state


class Hello(NamedTuple):
    """The knowledge of a worker that joins the next view."""

    view: int  # number of the last view that it was in; 0: none
    steps: tuple[int, ...]  # steps of its complete copies


Decide = Callable[[Sequence[Hello]], View]


def next_view(sharded: bool, hellos: Sequence[Hello]) -> View:
    workers = SIZE if sharded else 0
    held = [
        [Held(step, 0, workers, [rank, (rank - 1) % SIZE][:workers]) for step in hello.steps]
        for rank, hello in enumerate(hellos)
    ]
    found = continued(held)
    senders = set() if found is None else {found.source, *found.senders.values()}
    step = 0 if found is None else found.step
    return View(1 + max(hello.view for hello in hellos), tuple(sorted(senders)), step)


class Worker(NamedTuple):
    """A worker: dead, between two views, or in one."""

    alive: bool = True
    last: int = 0  # number of the last view that it was in
    view: View | None = None
    says_hello: bool = False
    step: int | None = None  # number of steps of its state
    before: int | None = None  # those of its copy before, until it begins the next one
    summed: bool = False  # whether it has the sum of the next step, of which it makes a copy
    sent: bool = False  # whether it has contributed to the next step, or then to the copies
    # ranks whose contributions to these it has, or before it has a state, whose copies
    got: frozenset[int] = frozenset()

    @property
    def copies(self) -> tuple[int, ...]:
        return tuple(step for step in (self.before, self.step) if step is not None)


class Message(NamedTuple):
    """A contribution to the sum of a step, or to the copies after it, or a state."""

    sender: int
    receiver: int
    view: int
    step: int
    summed: bool = False  # whether it is one to the copies
    is_state: bool = False


@dataclasses.dataclass(frozen=True)
class State:
    """The state of all workers and of all connections between them."""

    workers: tuple[Worker, ...]
    messages: frozenset[Message] = frozenset()
    # the replies to all hellos that are on their way, by rank
    replies: frozenset[tuple[int, View]] = frozenset()
    deaths: int = 0  # number of workers that have died
    steps: int = 1  # number of steps of the training

    def with_worker(self, rank: int, **changes: Any) -> State:
        workers = list(self.workers)
        workers[rank] = workers[rank]._replace(**changes)
        return dataclasses.replace(self, workers=tuple(workers))

    def with_messages(self, add: Sequence[Message] = (), remove: Sequence[Message] = ()) -> State:
        return dataclasses.replace(self, messages=(self.messages | set(add)) - set(remove))


def moves(state: State, decide: Decide) -> Iterator[State]:
    """All states that follow, without a death."""
    for rank, worker in enumerate(state.workers):
        if not worker.alive:
            yield state.with_worker(rank, alive=True)  # a replacement without a state
        elif worker.view is None:
            if not worker.says_hello and rank not in dict(state.replies):
                yield state.with_worker(rank, says_hello=True)
        elif is_broken(state, rank):
            yield left(state, rank)
        else:
            yield from steps_of(state, rank, worker)
    if all(worker.alive and worker.says_hello for worker in state.workers):
        view = decide([Hello(worker.last, worker.copies) for worker in state.workers])
        met = state
        for rank in range(SIZE):
            met = met.with_worker(rank, says_hello=False)
        yield dataclasses.replace(met, replies=frozenset((rank, view) for rank in range(SIZE)))
    for rank, view in state.replies:
        yield entered(state, rank, view)
    for message in state.messages:
        yield from received(state, message)


def is_broken(state: State, rank: int) -> bool:
    """Whether a connection of this worker's view is closed."""
    view = state.workers[rank].view
    enter = {other for other, reply in state.replies if reply == view}
    return any(
        worker.view != view and other not in enter for other, worker in enumerate(state.workers)
    )


def left(state: State, rank: int) -> State:
    """The worker closes its connections; its messages may still arrive."""
    return state.with_worker(rank, view=None, summed=False, sent=False, got=frozenset())


def entered(state: State, rank: int, view: View) -> State:
    state = dataclasses.replace(state, replies=state.replies - {(rank, view)})
    changes: dict[str, Any] = {"before": None}
    if view.step in state.workers[rank].copies:
        changes["step"] = view.step
    state = state.with_worker(rank, view=view, last=view.number, **changes)
    if rank in view.senders:
        # The others ignore it, so that there are fewer states.
        others = [o for o in range(SIZE) if view.step not in state.workers[o].copies]
        return state.with_messages(
            [Message(rank, other, view.number, view.step, is_state=True) for other in others]
        )
    return state


def steps_of(state: State, rank: int, worker: Worker) -> Iterator[State]:
    """A worker with the state of the view, or a later one, contributes, updates, and copies."""
    view = worker.view
    assert view is not None
    if worker.step is None or worker.step < view.step or worker.step == state.steps:
        return
    if not worker.sent:
        others = [other for other in range(SIZE) if other != rank]
        sent = [
            Message(rank, other, view.number, worker.step, summed=worker.summed) for other in others
        ]
        before = None if worker.summed else worker.before
        begun = state.with_worker(rank, sent=True, got=worker.got | {rank}, before=before)
        yield begun.with_messages(sent)
    elif len(worker.got) == SIZE and not worker.summed:
        yield state.with_worker(rank, summed=True, sent=False, got=frozenset())
    elif len(worker.got) == SIZE:
        done = {"step": worker.step + 1, "before": worker.step, "summed": False}
        yield state.with_worker(rank, sent=False, got=frozenset(), **done)


def received(state: State, message: Message) -> Iterator[State]:
    """The message is lost with its connection, or handled."""
    worker, sender = state.workers[message.receiver], state.workers[message.sender]
    rest = state.with_messages(remove=[message])
    if worker.view is None or worker.view.number != message.view:
        return  # it has not entered the view yet
    if sender.view is None or sender.view.number != message.view:
        yield rest
    if message.is_state:
        behind = worker.step is None or worker.step < message.step
        got = worker.got | {message.sender}
        if behind and got >= set(worker.view.senders):
            yield rest.with_worker(message.receiver, step=message.step, got=frozenset())
        else:
            yield rest.with_worker(message.receiver, got=got) if behind else rest
    elif (worker.step, worker.summed) == (message.step, message.summed):
        yield rest.with_worker(message.receiver, got=worker.got | {message.sender})


def without_late_messages(state: State) -> State:
    """Drops the messages of a view that the receiver has left; its connections are closed."""
    kept = {
        m
        for m in state.messages
        if state.workers[m.receiver].alive
        and (state.workers[m.receiver].view is not None or state.workers[m.receiver].last < m.view)
    }
    return dataclasses.replace(state, messages=frozenset(kept))


def deaths(state: State, most: int) -> Iterator[State]:
    for rank, worker in enumerate(state.workers):
        if worker.alive and state.deaths < most:
            died = state.with_worker(rank, **Worker(alive=False)._asdict())
            replies = frozenset(reply for reply in state.replies if reply[0] != rank)
            yield dataclasses.replace(died, deaths=state.deaths + 1, replies=replies)


def all_restart(state: State) -> bool:
    return any(w.view is not None and not w.view.senders for w in state.workers)


def has_state(state: State) -> bool:
    return any(worker.step is not None for worker in state.workers)


def require_right(before: State, after: State, sharded: bool) -> None:
    """Checks a transition: a step is made for all or for none, and no state is of another step."""
    for old, new in zip(before.workers, after.workers, strict=True):
        if old.alive and new.alive and old.step is not None and new.step is not None:
            least = old.step
            if sharded and new.view is not None and new.view != old.view:
                least = min(least, new.view.step)  # all make a step again that some have completed
            assert new.step >= least, "a worker has lost a step"
    for view in {worker.view for worker in after.workers if worker.view is not None}:
        members = [worker for worker in after.workers if worker.view == view]
        own = [w.step for w in members if w.step is not None and w.step >= view.step]
        assert max(own, default=0) - min(own, default=0) <= 1, "a step was made without a worker"
        assert all(worker.step is None or worker.step >= view.step - 1 for worker in members)


def explored(
    decide: Decide, steps: int = 1, most: int = 1, sharded: bool = False
) -> dict[State, list[State]]:
    """Every reachable state, and those that follow it without a death.

    Args:
        most: number of workers that may die.
    """
    found: dict[State, list[State]] = {}
    waiting = [State(tuple(Worker(step=0) for _ in range(SIZE)), steps=steps)]
    while waiting:
        state = waiting.pop()
        if state in found:
            continue
        found[state] = [without_late_messages(after) for after in moves(state, decide)]
        every = [*found[state], *map(without_late_messages, deaths(state, most))]
        for after in every:
            require_right(state, after, sharded)
        waiting += every
    return found


def stuck(found: dict[State, list[State]]) -> set[State]:
    """States from which the training can't end, though no worker dies any more.

    It ends with a restart of all, too, if workers that shard a state have lost it.
    """
    before: dict[State, list[State]] = {state: [] for state in found}
    for state, every in found.items():
        for after in every:
            before[after].append(state)
    ended = [s for s in found if all(w.step == s.steps for w in s.workers) or all_restart(s)]
    reached = set(ended)
    while ended:
        for state in before[ended.pop()]:
            if state not in reached:
                reached.add(state)
                ended.append(state)
    return set(found) - reached


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("steps", "most"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.nightly),
        pytest.param(1, 2, marks=pytest.mark.nightly),
    ],
)
def test_a_step_is_made_for_all_or_for_none_whoever_dies_whenever(
    steps: int, most: int, sharded: bool
) -> None:
    found = explored(functools.partial(next_view, sharded), steps, most, sharded)
    assert not stuck(found)
    assert any({worker.step for worker in state.workers} == {None, 0, 1} for state in found)
    if most == 1:  # the state survives any death
        assert all(has_state(state) for state in found)
        views = {worker.view for state in found for worker in state.workers if worker.view}
        assert all(view.senders for view in views)


def least_advanced(hellos: Sequence[Hello]) -> View:
    view, steps = next_view(False, hellos), [hello.steps[-1:] for hello in hellos]
    if not any(steps):
        return view
    least = min(step for step in steps if step)
    return View(view.number, (steps.index(least),), least[0])


def without_a_new_number(hellos: Sequence[Hello]) -> View:
    return next_view(False, hellos)._replace(number=1)


def newest_shards_alone(hellos: Sequence[Hello]) -> View:
    """The decision of workers that keep the newest copy of their shards only."""
    return next_view(True, [Hello(hello.view, hello.steps[-1:]) for hello in hellos])


@pytest.mark.parametrize("wrong", [least_advanced, without_a_new_number, newest_shards_alone])
def test_the_exploration_finds_wrong_protocols(wrong: Decide) -> None:
    try:
        found = explored(wrong, sharded=wrong is newest_shards_alone)
    except AssertionError:
        return
    views = {worker.view for state in found for worker in state.workers if worker.view}
    assert stuck(found) or not all(view.senders for view in views)


def whole(*steps: int, attempt: int = 0) -> list[Held]:
    return [Held(step, attempt) for step in steps]


def shards(*ranks: int, step: int = 7, workers: int = 3, attempt: int = 0) -> list[Held]:
    return [Held(step, attempt, workers, ranks)]


def rows(*ranks: int, step: int = 7) -> list[Held]:
    return [Held(step, 0, 3, ranks, has_rows=True)]


def test_the_state_of_the_latest_step_that_is_complete_is_taken() -> None:
    assert continued([whole(41), whole(42, 41), [], whole(42)]) == (42, 0, 1, {})
    assert continued([whole(0), whole(0)]) == (0, 0, 0, {})
    assert continued([[], []]) is None
    # Worker 2 is lost; worker 0 keeps its shards.
    lost = [shards(0, 2), shards(1, 0), []]
    assert continued(lost) == (7, 0, 0, {0: 0, 1: 1, 2: 0})
    # Worker 0 has completed the copy before only.
    lost[1] += shards(1, 0, step=8)
    assert continued(lost) == (7, 0, 0, {0: 0, 1: 1, 2: 0})
    # Two neighbours are lost.
    assert continued([shards(0, 3, workers=4), shards(1, 0, workers=4), [], []]) is None
    others = [shards(0, 3, workers=4), [], shards(2, 1, workers=4), []]
    assert continued(others) == (7, 0, 0, {0: 0, 1: 2, 2: 2, 3: 0})


def test_copies_of_an_attempt_before_are_taken_whole_and_by_any_number_of_workers() -> None:
    # Two workers take the files that three have left, the third of them on another machine.
    assert continued([shards(0, 2), shards(1, 0)]) == (7, 0, 0, {0: 0, 1: 1, 2: 0})
    assert continued([[], [*shards(0, 2), *shards(1, 0)]]) == (7, 0, 1, {0: 1, 1: 1, 2: 1})
    # Copies of two attempts are not put together, and of the same step the later one is taken.
    mixed = [shards(0, 2), shards(1, 0, workers=2, attempt=1)]
    assert continued(mixed) == (7, 1, 1, {0: 1, 1: 1})
    assert continued([shards(0, 2), shards(1, workers=3, attempt=1)]) is None
    assert continued([whole(7), whole(7, attempt=1)]) == (7, 1, 1, {})
    assert continued([whole(8), whole(7, attempt=1)]) == (8, 0, 0, {})


def test_rows_of_a_lost_worker_are_missing_only_if_no_copy_has_them() -> None:
    known = [[*rows(0, step=7), *rows(0, step=8)], [*rows(1, step=7), *rows(1, step=8)], []]
    assert continued(known) == (8, 0, 0, {0: 0, 1: 1})
    known[2] = rows(2, step=7)  # its file is a copy behind
    assert continued(known) == (7, 0, 0, {0: 0, 1: 1, 2: 2})
    known[2] += rows(2, step=8)
    assert continued(known) == (8, 0, 0, {0: 0, 1: 1, 2: 2})


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ({0, 2}, [[1, 2], [3, 4], [5, 6], [5, 6], [9, 10], [7, 8]]),
        ({1}, [[6, 5], [6, 5], [5, 4], [7, 6], [6, 5], [6, 5]]),
        ({0, 1, 2}, [[1, 2], [3, 4], [5, 4], [7, 6], [9, 10], [7, 8]]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "int64", "bfloat16"])
def test_lost_rows_get_the_mean_of_all_others(
    present: set[int], expected: list[list[int]], dtype: str
) -> None:
    """Three workers have two replicas each."""
    type_ = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    values = np.array([[1, 2], [3, 4], [5, 4], [7, 6], [9, 10], [7, 8]], type_)
    slots = {"m": values, "empty": np.zeros([6, 0], "float32"), "step": np.full([6, 1], 7, "int64")}
    of_one = [[("m", 4 * i, 4), ("empty", 0, 0), ("step", 2 * i, 2)] for i in range(3)]
    described = {name: (str(a.dtype), a.shape) for name, a in slots.items()}
    Layout.of(of_one, described, True).replace_lost(slots, present)
    np.testing.assert_array_equal(values.astype("float64"), expected)
    np.testing.assert_array_equal(slots["step"], np.full([6, 1], 7))
