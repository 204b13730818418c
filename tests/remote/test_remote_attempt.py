"""End of an attempt on several machines, from their reports."""

from __future__ import annotations

import math

from tfmw.launcher.failure import Failure
from tfmw.launcher.options import RunOptions
from tfmw.launcher.remote.remote_attempt import RemoteAttempt
from tfmw.launcher.restart import AttemptOutcome

GRACE_S = 7.0
DONE = AttemptOutcome(done=True, step=5)


def attempt_of(settle_s: float = 0.0) -> RemoteAttempt:
    options = RunOptions(preempt_grace_s=GRACE_S)
    return RemoteAttempt(3, {0, 1}, options, "h{}".format, 100.0, settle_s)


def failed(task: str, secondary: bool = False) -> AttemptOutcome:
    return AttemptOutcome(step=4, failures=(Failure(task, error="E", secondary=secondary),))


def test_all_are_done() -> None:
    attempt = attempt_of()
    attempt.ended(0, DONE, 101.0)
    assert (attempt.running, attempt.end_at) == ({1}, math.inf)
    attempt.ended(1, DONE, 102.0)
    outcome = attempt.outcome(102.0)
    assert (outcome.failures, outcome.preempted, outcome.step) == ((), False, 5)
    assert (outcome.seconds, outcome.attempt) == (2.0, 3)


def test_the_cause_is_waited_for_and_comes_first() -> None:
    attempt = attempt_of(settle_s=3.0)
    attempt.ended(0, failed("worker 0", secondary=True), 101.0)
    assert not attempt.must_end(103.9)
    attempt.ended(1, failed("worker 1"), 102.0)
    assert attempt.must_end(102.0)
    assert [f.task for f in attempt.outcome(102.0).failures] == ["worker 1", "worker 0"]
    assert attempt_of(settle_s=3.0).end_at == math.inf


def test_a_lost_machine_is_a_failure_from_outside_once() -> None:
    attempt = attempt_of()
    attempt.lost(1, "no sign of life for 3 s", 104.0)
    attempt.lost(1, "again", 105.0)
    assert attempt.must_end(104.0)
    (failure,) = attempt.outcome(105.0).failures
    assert (failure.task, failure.how, failure.seconds) == ("h1", "no sign of life for 3 s", 4.0)
    assert failure.external


def test_tasks_that_end_without_a_reason_have_failed() -> None:
    """A task may end like one that somebody kills on its machine; not once the leader ends all."""
    attempt = attempt_of()
    attempt.ended(0, AttemptOutcome(step=2), 101.0)
    attempt.ended(1, AttemptOutcome(step=2), 101.5)
    assert [f.task for f in attempt.outcome(102.0).failures] == ["h0"]


def test_preempted_tasks_have_a_limit_and_their_peers_have_not_failed() -> None:
    attempt = attempt_of()
    attempt.ended(0, AttemptOutcome(preempted=True, step=6), 101.0)
    assert attempt.end_at == 101.0 + GRACE_S
    attempt.ended(1, failed("worker 1", secondary=True), 102.0)
    outcome = attempt.outcome(102.0)
    assert (outcome.preempted, outcome.failures) == (True, ())


def test_failures_after_the_chief_is_done_are_a_consequence() -> None:
    attempt = attempt_of()
    attempt.ended(0, DONE, 101.0)
    attempt.succeeded(101.0, farewell_s=10.0)
    attempt.lost(1, "silent", 102.0)
    assert attempt.end_at == 111.0
    assert attempt.outcome(102.0).failures == ()
