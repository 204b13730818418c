"""A member's side of the rounds of `round_server`.

    client = RoundClient.of_environment(os.environ)        # None: the process is no member
    record, arrays, steps = client.enter()                 # its position when it was lost, or None
    seed = client.fact("seed", 17)                         # the first member's value
    state = client.join(signature, known=0)                # None: no member has a state yet
    mean = client.round(examples=64.0, arrays=[gradient])
    client.keep(record, arrays)                            # `enter` returns them after a restart

Each call of `fit` has a client of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfmw.cluster import wire
from tfmw.cluster.cluster import MEMBER, MEMBERS, ROUNDS, TOKEN
from tfmw.cluster.wire import Message
from tfmw.errors import TfmwError, UsageError
from tfmw.observe import task_process
from tfmw.observe.progress import blocking_call

logger = logging.getLogger("tfmw")

_SAID_AFTER_S = 15.0  # time in which all members of a working cluster connect

_calls = itertools.count()  # number of the call of fit in this process; the same in a restarted one


@dataclasses.dataclass(frozen=True)
class RoundAnswer:
    """The server's answer to a member that joins, or that sends a round."""

    # For joining, the state of another member; empty if all have this member's state. For a round,
    # the means; empty without examples.
    arrays: list[np.ndarray]
    wants_state: bool  # whether this member must send its state, for others that join
    finished: bool  # whether all members are done; for joining, `arrays` is the result then
    members: int = 0  # number of members in the round
    examples: float = 0.0  # number of examples of all members, since the last round


class RoundClient:
    """Connection of one member, for one thread.

    Args:
        address: HOST:PORT of the server.
        member: number of this member, from 0.
        members: number of all members.
        key: key that all members know.
        call: number of the call of fit in this process.

    Attributes:
        number: number of the next round.
        positions: each member's number of steps in all ended rounds.
    """

    _connection: wire.Connection  # set once it has entered

    def __init__(self, address: str, member: int, members: int, key: bytes, call: int = 0):
        self.member = member
        self.members = members
        self.number = 0
        self.positions: list[int] = []
        self._address = address
        self._key = key
        self._call = call

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> RoundClient | None:
        """The member that the environment describes, or None.

        Raises:
            UsageError: the description is incomplete.
        """
        address = environ.get(ROUNDS, "")
        if not address or task_process.is_child(environ=environ):
            return None
        numbers = [environ.get(name, "") for name in (MEMBER, MEMBERS)]
        key = environ.get(TOKEN, "")
        if not all(map(str.isdecimal, numbers)) or not key or ":" not in address:
            raise UsageError(
                f"received {ROUNDS}={address!r}, {MEMBER}={numbers[0]!r}, {MEMBERS}={numbers[1]!r} "
                f"and {'a' if key else 'no'} TFMW_TOKEN: expected HOST:PORT, two whole numbers, "
                "and the secret of the server; or start with tfmw run --elastic, which sets them."
            )
        return cls(address, int(numbers[0]), int(numbers[1]), key.encode(), next(_calls))

    # ------------------------------------------------------------ begin and end

    def enter(self) -> tuple[dict[str, Any] | None, list[np.ndarray], int]:
        """Connects; returns the last record of this member, its arrays, and its steps since then.

        The steps are in rounds that have ended.
        """
        try:
            self._connection = wire.connect(self._address, self._key)
        except (OSError, ValueError) as e:
            raise TfmwError(
                f"no server of rounds at {self._address} ({e}): start it with python -m "
                "tfmw.train.local_sgd.round_server, with the same TFMW_TOKEN."
            ) from e
        hello = {"member": self.member, "members": self.members, "call": self._call}
        try:
            answer, arrays = self._asked(hello)
        except TfmwError:
            self.leave()
            raise
        self.number = answer["round"]
        return answer["record"], arrays, answer["unrecorded"]

    def leave(self) -> None:
        """Closes the connection."""
        self._connection.close()

    # ------------------------------------------------------------ messages

    def fact(self, name: str, value: Any) -> Any:
        """The first member's value, JSON, for this name."""
        return self._asked({"do": "fact", "name": name, "value": value})[0]["value"]

    def join(self, signature: str, known: int, positions: Sequence[int] = ()) -> RoundAnswer:
        """Waits until this member has joined.

        Args:
            signature: text that must be the same on all members.
            known: the number of the last round that this member's own state contains.
            positions: positions after that round.

        Raises:
            UsageError: the signature differs from that of other members.
        """
        asked = {
            "do": "join", "signature": signature, "round": known, "positions": list(positions)
        }  # fmt: skip
        with blocking_call("joining the rounds"):
            return self._answered(asked)

    def round(
        self,
        examples: float,
        arrays: Sequence[np.ndarray],
        steps: int = 0,
        packed: str | None = None,
        elements: int = 0,
        done: bool = False,
    ) -> RoundAnswer:
        """Sends this member's arrays; waits for the mean over all present members.

        Args:
            examples: number of this member's examples since the last round, which is its weight.
            arrays: the same number of arrays on each member.
            steps: number of this member's steps since the last round.
            packed: format of the first array; see `QuantizedSum`.
            elements: number of elements of the first array.
            done: whether this member has no more examples.
        """
        of_first = {"packed": packed, "elements": elements}
        message = {"do": "round", "examples": examples, "steps": steps, "done": done, **of_first}
        with blocking_call("exchange of weights"):
            return self._answered(message, arrays)

    def _answered(
        self, message: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()
    ) -> RoundAnswer:
        waits = threading.Timer(_SAID_AFTER_S, self._say_that_it_waits, [message["do"]])
        waits.daemon = True
        waits.start()
        try:
            answer, received = self._asked(message, arrays)
        finally:
            waits.cancel()
        self.number, self.positions = answer.pop("round"), answer.pop("positions")
        return RoundAnswer(received, **answer)

    def _say_that_it_waits(self, what: str) -> None:
        others = "members that have not come" if what == "join" else "other members"
        logger.warning(
            "member %d of %d has waited %d s for the server of rounds at %s: it waits for %s, "
            "or it has stopped",
            self.member,
            self.members,
            _SAID_AFTER_S,
            self._address,
            others,
        )

    def send_state(self, arrays: Sequence[np.ndarray]) -> None:
        """Sends this member's state, for joining members."""
        with self._server() as server:
            server.send({"do": "state"}, arrays)

    def keep(self, record: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """Replaces this member's record."""
        with self._server() as server:
            server.send({"do": "record", "record": record}, arrays)

    def _asked(
        self, message: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()
    ) -> tuple[Message, list[np.ndarray]]:
        with self._server() as server:
            server.send(message, arrays)
            answer, received = server.receive()
        if "lost" in answer:
            raise TfmwError(f"{answer['lost']}; start it again.")
        if "error" in answer:
            raise UsageError(f"members of the rounds differ: {answer['error']}.")
        return answer, received

    @contextlib.contextmanager
    def _server(self) -> Iterator[wire.Connection]:
        try:
            yield self._connection
        except OSError as e:
            raise TfmwError(f"the server of rounds at {self._address} was lost: {e}") from e
