"""Progress that a task reports and its launcher reads."""

from __future__ import annotations

import os
import time
from concurrent import futures

import pytest

from tfmw.launcher.process import TaskFiles
from tfmw.observe import progress


@pytest.fixture
def last(tmp_path, monkeypatch):
    """Returns the last report of this process, as its launcher reads it."""
    task = TaskFiles("worker", 0, tmp_path)
    task.make()
    monkeypatch.setenv(progress.PROGRESS_FILE, str(task.files[progress.PROGRESS_FILE]))
    return task.progress


def test_before_the_first_report(last):
    assert last()[:4] == (progress.NOT_UP, 0, "", 0.0)


def test_each_report_is_read_even_of_the_same_step(last):
    progress.report_progress(7)
    first = last()
    progress.report_alive()
    assert (first.step, first.blocked_in) == (7, "")
    assert last()[:4] == (7, first.reports + 1, "", 0.0)
    assert first.division.at <= last().division.at


def test_the_rate_is_that_of_the_last_half_minute(last, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_reporter", progress._Reporter())
    for step, seconds in [(0, 0), (10, 1), (100, 9), (200, 10), (210, 10), (220, 10), (230, 10)]:
        now[0] += seconds
        progress.report_progress(step)
    assert last().steps_per_s == 30 / 30  # the first 200 steps took 20 s
    progress.report_progress(0)  # another training
    assert last().steps_per_s == 0.0


def test_nested_blocking_calls_are_named(last):
    progress.report_progress(7)
    with progress.blocking_call("export"):
        with progress.blocking_call("backup"):
            assert last()[:3:2] == (7, "backup")
        progress.report_progress(8)
        assert last()[:3:2] == (8, "export")
    assert last()[:3:2] == (8, "")


def test_blocking_calls_of_two_threads_may_end_in_any_order(last):
    first, second = progress.blocking_call("backup"), progress.blocking_call("export")
    with futures.ThreadPoolExecutor(1) as other:
        first.__enter__()
        other.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        assert last().blocked_in == "export"
        other.submit(second.__exit__, None, None, None).result()
    assert last().blocked_in == ""


def test_a_blocking_call_that_fails_has_ended(last):
    @progress.blocking_call("export")
    def export() -> None:
        raise ValueError("no space left")

    with pytest.raises(ValueError, match="no space"):
        export()
    assert last().blocked_in == ""


def test_without_a_launcher_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.delenv(progress.PROGRESS_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    with progress.blocking_call("export"):
        progress.report_progress(1)
    assert os.listdir() == []
