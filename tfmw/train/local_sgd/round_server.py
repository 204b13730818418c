"""The server of elastic rounds: averages its members' values, and replaces lost members.

    python -m tfmw.train.local_sgd.round_server --members 4 --port 2300      # prints its address
    with RoundServer(members=4, key=key, listener=socket): ...

Each member trains independently. A round is over when each present member has sent its gradient:
each gets the mean, weighted by examples. The round, and later ones, continue without a lost member.
A joining member waits for the end of a round. Then the member with the lowest number sends its
state (weights, both optimizers), which the server passes on. If no member is present, the first
round waits for all members, at most `patience_s`. The member that knows the latest round sends its
state.

After each round a member sends a record: its position in the data. A member that joins again gets
the last record it has sent, and the number of its steps in rounds that ended since. So it trains
once on each example of a round that has ended. Answers have the positions of all members: their
steps in all ended rounds. A backup on disk contains them. If all members start from their backups,
the positions of the latest backup hold for all. A member that is done stays without examples until
all are done. Then the server keeps the last state, for members that were lost at the very end.

If all present members are lost at once, their records are void: all start from their backups.

Each call of fit has rounds of its own. NumPy and the standard library only; no files.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfmw.cluster import sockets, wire
from tfmw.cluster.cluster import TOKEN
from tfmw.cluster.wire import Connection, Message
from tfmw.train.local_sgd.quantized_sum import QuantizedSum

PATIENCE_S = 60.0
"""Seconds in which all members must come if none is present."""

_ALL_LOST = {"lost": "all members that took part were lost: this one begins with its backup"}

Arrays = list[np.ndarray]


@dataclasses.dataclass(eq=False)
class _Seat:
    """A connected member."""

    connection: Connection
    resumes: bool  # whether it was given a record
    # Its message that waits for an answer, "join" or "round", and the arrays; empty while it
    # trains.
    asks: Message = dataclasses.field(default_factory=dict)
    arrays: Arrays = dataclasses.field(default_factory=list)
    takes_part: bool = False  # whether rounds wait for it
    done: bool = False  # whether it has no more examples

    def answer(self, message: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Answers the member, without waiting for a slow connection.

        The thread that receives from a member detects its loss. A member sends no request before it
        has the answer, so two answers cannot overtake each other.
        """

        def send() -> None:
            with contextlib.suppress(OSError):
                self.connection.send(message, arrays)

        self.asks, self.arrays = {}, []
        threading.Thread(target=send, daemon=True).start()


class RoundServer:
    """Serves until it is closed.

    Args:
        members: number of members.
        key: key that all members know.
        listener: a listening socket; closed at the end.
        patience_s: see the module's docstring.
    """

    def __init__(
        self, members: int, key: bytes, listener: socket.socket, patience_s: float = PATIENCE_S
    ):
        self._members = members
        self._patience_s = patience_s
        self._lock = threading.RLock()
        self._trainings: dict[int, _Training] = {}  # number of the call of fit -> its rounds
        self._server = wire.Server(listener, key, self._serve, "rounds")

    def __enter__(self) -> RoundServer:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for training in self._trainings.values():
                training.close()
        self._server.close()

    def _serve(self, peer: socket.socket) -> None:
        with (
            contextlib.closing(Connection(peer)) as connection,
            contextlib.suppress(ValueError, KeyError),  # of messages that no member sends
        ):
            hello, _ = connection.receive()
            member, members, call = (int(hello[name]) for name in ("member", "members", "call"))
            if members != self._members:
                problem = f"this member knows {members} members, the server {self._members}"
            elif not 0 <= member < members:
                problem = f"received member {member}: expected 0 to {members - 1}"
            else:
                self._serve_member(connection, member, call)
                return
            connection.send({"error": problem})

    def _serve_member(self, connection: Connection, member: int, call: int) -> None:
        with self._lock:
            if call not in self._trainings:
                self._trainings[call] = _Training(self._members, self._patience_s, self._lock)
            training = self._trainings[call]
            seat = training.enter(member, connection)
        try:
            while True:
                message, arrays = connection.receive()
                with self._lock:
                    training.handle(member, seat, message, arrays)
        finally:
            with self._lock:
                training.leave(member, seat)


class _Training:
    """The rounds of one call of fit. All methods are called under the lock.

    Args:
        members: number of members.
        patience_s: see the module's docstring.
        lock: lock of the server.
    """

    def __init__(self, members: int, patience_s: float, lock: threading.RLock):
        self._members = members
        self._patience_s = patience_s
        self._lock = lock
        self._seats: dict[int, _Seat] = {}
        self._round = 0
        self._sender: int | None = None  # the member that must send its state
        self._joining: list[int] = []  # members that wait for that state
        self._timer: threading.Timer | None = None
        self._impatient = False
        self._closed = False
        self._facts: dict[str, Any] = {}
        self._records: dict[int, tuple[Any, Arrays]] = {}
        # number of steps of ended rounds that no record contains
        self._unrecorded: dict[int, int] = {}
        self._positions = [0] * members  # number of steps of each member in ended rounds
        self._done: set[int] = set()
        self._finished = False
        self._last_state: Arrays | None = None
        self._quantized: QuantizedSum | None = None  # keeps the rounding errors of a mean

    def close(self) -> None:
        """Closes all connections."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for seat in self._seats.values():
            seat.connection.close()

    def enter(self, member: int, connection: Connection) -> _Seat:
        """Registers a member that has connected."""
        before = self._seats.get(member)
        if before is not None:
            self.leave(member, before)
        record, arrays = self._records.get(member, (None, []))
        seat = self._seats[member] = _Seat(connection, resumes=record is not None)
        unrecorded = self._unrecorded.get(member, 0)
        seat.answer({"round": self._round, "record": record, "unrecorded": unrecorded}, arrays)
        return seat

    def leave(self, member: int, seat: _Seat) -> None:
        """Handles the end of a connection."""
        seat.connection.close()
        if self._seats.get(member) is not seat:
            return
        del self._seats[member]
        self._joining = [m for m in self._joining if m != member]
        needed = self._joining or (self._finished and self._last_state is None)
        if member == self._sender or not needed:  # another member sends its state, or none does
            self._sender, self._joining = None, []
        if seat.takes_part and not any(other.takes_part for other in self._seats.values()):
            self._forget()
        self._proceed()

    def _forget(self) -> None:
        """Discards all records, as no member has the state: members start from backups."""
        if self._finished:
            return
        self._records, self._unrecorded, self._done = {}, {}, set()
        self._positions = [0] * self._members
        self._quantized = None
        for seat in self._seats.values():
            if seat.resumes and seat.asks:
                seat.answer(_ALL_LOST)

    def handle(self, member: int, seat: _Seat, message: Message, arrays: Arrays) -> None:
        """Processes a member's message."""
        if self._seats.get(member) is not seat:
            return
        do = message["do"]
        if do == "fact":  # all get the first member's value
            value = self._facts.setdefault(message["name"], message["value"])
            seat.answer({"value": value})
        elif do == "record":
            self._records[member] = message["record"], arrays
            self._unrecorded[member] = 0
        elif do == "state":
            self._pass_on(member, arrays)
        elif do == "join":
            agreed = self._facts.setdefault("signature", message["signature"])
            if agreed != message["signature"]:
                seat.answer({"error": f"one has {message['signature']}, others have {agreed}"})
                return
            if seat.resumes and member not in self._records:
                seat.answer(_ALL_LOST)
                return
            seat.asks = message
            self._proceed()
        elif do == "round":
            seat.asks, seat.arrays, seat.done = message, arrays, message["done"]
            if seat.done:
                self._done.add(member)
            self._proceed()

    # ------------------------------------------------------------ what can be done now

    def _wanting_to_join(self) -> list[int]:
        return [
            m
            for m, seat in sorted(self._seats.items())
            if not seat.takes_part and seat.asks and m not in self._joining
        ]

    def _proceed(self) -> None:
        """Ends a round, or starts the first one, if all needed messages have arrived."""
        if self._closed or self._sender is not None:
            return
        present = {m: seat for m, seat in sorted(self._seats.items()) if seat.takes_part}
        if self._finished:
            for member in self._wanting_to_join():
                if self._last_state is None:  # the member that had to send it was lost
                    self._seats[member].answer(_ALL_LOST)
                else:
                    self._seats[member].answer(self._answer(), self._last_state)
        elif not present:
            self._begin()
        elif all(seat.asks for seat in present.values()):
            absent = set(range(self._members)) - set(present) - self._done
            if all(s.done for s in present.values()) and absent and not self._wanting_to_join():
                return  # the round waits for the others
            self._end_round(present)

    def _begin(self) -> None:
        """Starts, if no member is present, once all have come or the patience is over."""
        waiting = self._wanting_to_join()
        if not waiting:
            return
        missing = set(range(self._members)) - set(waiting) - self._done
        if missing and not self._impatient:
            if self._timer is None:
                self._timer = threading.Timer(self._patience_s, self._be_impatient)
                self._timer.daemon = True
                self._timer.start()
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._impatient = None, False
        known = {m: self._seats[m].asks["round"] for m in waiting}
        founder = max(waiting, key=lambda m: (known[m], -m))
        self._round = max(self._round, known[founder])
        self._positions = self._seats[founder].asks["positions"] or self._positions
        others = [m for m in waiting if m != founder]
        self._seats[founder].takes_part = True
        if others:
            self._sender, self._joining = founder, others
        self._seats[founder].answer(self._answer(wants_state=bool(others)))

    def _be_impatient(self) -> None:
        with self._lock:
            self._impatient, self._timer = True, None
            self._proceed()

    def _answer(self, wants_state: bool = False) -> Message:
        return {
            "round": self._round,
            "positions": list(self._positions),
            "wants_state": wants_state,
            "finished": self._finished,
        }

    def _pass_on(self, member: int, arrays: Arrays) -> None:
        """Passes a member's state on to joining members, for whom rounds wait from now on."""
        if member != self._sender:
            return
        joining, self._sender, self._joining = self._joining, None, []
        if self._finished:
            self._last_state = arrays
        for other in joining:
            seat = self._seats.get(other)
            if seat is not None:
                seat.takes_part = True
                seat.answer(self._answer(), arrays)
        self._proceed()

    def _end_round(self, present: dict[int, _Seat]) -> None:
        messages = [seat.asks for seat in present.values()]
        mean = self._mean(messages, [seat.arrays for seat in present.values()])
        joining = self._wanting_to_join()
        self._finished = all(seat.done for seat in present.values()) and not joining
        self._round += 1
        if joining or self._finished:
            self._sender, self._joining = next(iter(present)), joining
        for member, seat in present.items():
            self._unrecorded[member] = self._unrecorded.get(member, 0) + seat.asks["steps"]
            self._positions[member] += seat.asks["steps"]
        for member, seat in present.items():
            examples = sum(message["examples"] for message in messages)
            answer = self._answer(wants_state=member == self._sender)
            seat.answer({**answer, "members": len(present), "examples": examples}, mean)

    def _mean(self, messages: Sequence[Message], arrays: Sequence[Arrays]) -> Arrays:
        """The mean of each array, weighted by examples; empty without examples.

        Args:
            messages: each with "examples"; "packed", the format of the first array or None; and its
                "elements".
            arrays: arrays of each member, all with the same number.
        """
        total = sum(message["examples"] for message in messages)
        packed, elements = messages[0]["packed"], messages[0]["elements"]
        if packed is not None and self._quantized is None:
            self._quantized = QuantizedSum(elements, packed)
        quantized = self._quantized
        sums: Arrays = []
        for message, own in zip(messages, arrays, strict=True):
            if not message["examples"]:
                continue
            share = message["examples"] / total
            if quantized is not None:
                own = [quantized.values(own[0], elements), *own[1:]]
            scaled = [np.multiply(array, share, dtype=array.dtype) for array in own]
            if not sums:
                sums = scaled
                continue
            for array, add in zip(sums, scaled, strict=True):
                array += add
        if sums and quantized is not None:
            sums[0] = quantized.rounded(sums[0])
        return sums


def main(argv: Sequence[str] | None = None, out: Callable[[str], Any] = print) -> int:
    """Serves until a signal ends it; with --until-input-ends, at most as long as its launcher."""
    parser = argparse.ArgumentParser(prog="python -m tfmw.train.local_sgd.round_server")
    parser.add_argument("--members", type=int, required=True, help="number of members")
    parser.add_argument("--host", default="", help="address to listen at; default: all")
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="S",
        help="seconds in which all members come at first; default: 60",
    )
    parser.add_argument("--until-input-ends", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    token = os.environ.get(TOKEN, "")
    if not token:
        parser.error(f"{TOKEN} is not set: set the same secret for the server and members.")
    try:
        listener = sockets.listen(options.host, options.port)
    except OSError as error:
        parser.error(f"cannot listen at {options.host}:{options.port}: {error.strerror}.")
    with RoundServer(options.members, token.encode(), listener, options.patience):
        out(f"{options.host or socket.gethostname()}:{listener.getsockname()[1]}")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            if options.until_input_ends:
                sys.stdin.read()
            else:
                threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
