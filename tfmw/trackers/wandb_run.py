"""Weights & Biases: one run of all tasks and attempts, offline too.

W&B numbers the rows of a run's history: `_step`. A continued run has the id of the last attempt's
run, and numbers its rows as the uninterrupted run would. So a row that was logged twice has the
same number both times, and where the files of the last attempt are found, it is not logged again.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pickle
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger("tfmw")

FLUSH_S = 0.5
"""Seconds between two writes of the transaction log; with W&B's own 15, a kill loses more."""

_SERVICE = "WANDB_SERVICE"  # variable with the address of W&B's service, as W&B sets it
_PATIENCE_S = 10.0  # for the transaction log, before a backup
_POLL_S = 0.05


def silence(module: ModuleType) -> None:
    """Makes `wandb.init` return a run that logs nothing."""
    init = module.init

    @functools.wraps(init)
    def disabled(*args: Any, **kwargs: Any) -> Any:
        return init(*args, **{**kwargs, "mode": "disabled"})

    module.init = disabled  # type: ignore[attr-defined]


class Chief:
    """Continues runs on the chief.

    Args:
        run: identifies the training over its attempts; "": each attempt begins runs of its own.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._number = 0

    def __call__(self, module: ModuleType) -> None:
        init, kind = module.init, module.Run
        os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", str(FLUSH_S))

        @functools.wraps(init)
        def continued(*args: Any, **kwargs: Any) -> Any:
            chosen = {"id", "resume", "resume_from", "fork_from"} & {
                name for name, value in kwargs.items() if value is not None
            }
            if self._run and not chosen and "WANDB_RUN_ID" not in os.environ:
                suffix = f"-{self._number}" if self._number else ""
                self._number += 1
                kwargs |= {"id": self._run + suffix, "resume": "allow"}
            run = init(*args, **kwargs)
            _rows.setdefault(run.id, _Rows(run))
            return run

        module.init = continued  # type: ignore[attr-defined]
        log = kind.log

        @functools.wraps(log)
        def once(run: Any, data: Any, step: int | None = None, commit: bool | None = None) -> Any:
            rows = _rows.get(run.id)
            if rows is None or not rows.numbered:
                return log(run, data, step, commit)
            step, is_new = rows.place(step, commit)
            return log(run, data, step, commit is not False) if is_new else None

        kind.log = once


_rows: dict[str, _Rows] = {}  # by id of a run


class _Rows:
    """The rows of a run: those of earlier attempts, and the number of the next one.

    Args:
        run: as `wandb.init` returns it.

    Attributes:
        numbered: whether tfmw numbers the rows, as an earlier attempt has logged some.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self._next = 0
        self._file: _History | None = None
        self._held = -1  # the last row in the files of earlier attempts
        own = Path(run.settings.sync_dir) if run.settings.mode != "disabled" else None
        if own is not None:
            self._file = _History(own / f"run-{run.id}.wandb")
            for path in own.parent.glob(f"*run-*-{run.id}/run-{run.id}.wandb"):
                if path.parent != own:
                    self._held = max(self._held, _History(path).last_step())
        self.numbered = self._held >= 0

    @property
    def next_step(self) -> int:
        """The number of the next row."""
        return self._next if self.numbered else int(self.run.step)

    def go_on_at(self, step: int) -> None:
        """Sets the number of the next row."""
        self.numbered, self._next = True, step

    def place(self, step: int | None, commit: bool | None) -> tuple[int, bool]:
        """(number of a row that is logged, whether no earlier attempt has logged it)."""
        step = self._next if step is None else step
        self._next = step if commit is False else step + 1
        return step, step > self._held

    def wait_until_written(self) -> None:
        """Waits until the transaction log has every row of this process."""
        if self._file is None:
            return
        wanted, deadline = self.next_step - 1, time.monotonic() + _PATIENCE_S
        while max(self._file.last_step(), self._held) < wanted:
            if time.monotonic() > deadline:
                logger.warning(
                    "W&B has not written row %d of run %s within %g s: if this process is killed, "
                    "the row is lost.",
                    wanted,
                    self.run.id,
                    _PATIENCE_S,
                )
                return
            time.sleep(_POLL_S)


@dataclasses.dataclass
class _History:
    """The numbers of the rows in a transaction log, which may still grow.

    Its format is LevelDB's log behind a header of 7 bytes: blocks of 32 KiB; of each record a
    checksum, a length and a type: whole (1), first (2), middle (3) or last (4) part.
    """

    path: Path
    _read: int = 7
    _last: int = -1

    def last_step(self) -> int:
        """The number of the last row; -1 for none."""
        from wandb.proto import wandb_internal_pb2

        for data in self._records():
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                self._last = max(self._last, _step_of(record.history))
        return self._last

    def _records(self) -> Iterator[bytes]:
        """The complete records since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return
        start, at, parts = self._read, self._read, b""
        while True:
            left = _BLOCK - at % _BLOCK
            if left < _HEADER.size:
                at += left
            if at - start + _HEADER.size > len(data):
                return
            _, length, kind = _HEADER.unpack_from(data, at - start)
            body = data[at - start + _HEADER.size :][:length]
            if kind not in (1, 2, 3, 4) or len(body) < length:
                return
            parts = body if kind in (1, 2) else parts + body
            at += _HEADER.size + length
            if kind in (1, 4):
                self._read = at
                yield parts


_BLOCK = 32768
_HEADER = struct.Struct("<IHB")


def _step_of(history: Any) -> int:
    for item in history.item:
        if item.key == "_step" or list(item.nested_key) == ["_step"]:
            return int(item.value_json)
    return int(history.step.num)


def position() -> dict[str, Any] | None:
    """The id of the active run, and the number of its next row."""
    rows = _active()
    return None if rows is None else {"id": rows.run.id, "step": rows.next_step}


def resume(saved: dict[str, Any]) -> None:
    """Numbers the next row as in the interrupted training."""
    rows = _active()
    if rows is None:
        return
    if rows.run.id == saved["id"]:
        rows.go_on_at(saved["step"])
        return
    logger.warning(
        "the backup was taken in the W&B run %s, and this process logs to the run %s: to go on "
        "with the first, set TFMW_RUN_ID to the same value in each start of the training, or pass "
        "id and resume to wandb.init.",
        saved["id"],
        rows.run.id,
    )


def flush() -> None:
    """Waits until the transaction log of the active run has all rows."""
    rows = _active()
    if rows is not None:
        rows.wait_until_written()


def _active() -> _Rows | None:
    import wandb

    return None if wandb.run is None else _rows.get(wandb.run.id)


def active() -> dict[str, Any] | None:
    """The active run, which travels with the address of its service."""
    import wandb

    if wandb.run is None or wandb.run.disabled:
        return None
    service = os.environ.get(_SERVICE)
    return {"run": pickle.dumps(wandb.run), "service": service}


def adopt(sent: dict[str, Any]) -> None:
    """Lets `wandb.log` log to a run of another process of this machine."""
    import wandb

    try:
        if sent["service"]:
            os.environ[_SERVICE] = sent["service"]
        run = pickle.loads(sent["run"])
        wandb.run, wandb.log = run, run.log
        wandb.log_artifact, wandb.define_metric = run.log_artifact, run.define_metric
    except Exception as error:  # of another machine, say
        logger.warning("the caller's W&B run cannot be joined here: %s", error)
