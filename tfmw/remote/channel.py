"""Authenticated messages over one connection: HMAC-SHA256, a nonce of each side, sequence numbers.

    frame = Frames(session_key(token, nonce, other_nonce), "client").seal(b"...")
    Frames(session_key(token, nonce, other_nonce), "client").unseal(b"...", mac)   # or Forged

The token never travels. A frame that is altered, repeated, left out, sent back to its sender or
taken from another connection has the wrong MAC. Nothing is encrypted: whoever reads the network
reads what supervisors tell each other, which holds no secret.
"""

from __future__ import annotations

import hmac
import struct

from tfmw.errors import TfmwError

NONCE_BYTES = 32
MAC_BYTES = 32
LARGEST = 1 << 18
"""Bytes of one frame."""

HEADER = struct.Struct(f"!I{MAC_BYTES}s")
"""Before each message: its length and its MAC."""


class Forged(TfmwError):
    """A frame that does not come from a holder of the token, or not at this point."""


def session_key(token: bytes, nonce: bytes, other_nonce: bytes) -> bytes:
    """The key of one connection.

    Args:
        token: the secret of all processes of the run.
        nonce: of the side that was connected to.
        other_nonce: of the side that has connected.
    """
    return hmac.digest(token, b"tfmw hosts 1 " + nonce + other_nonce, "sha256")


class Frames:
    """The frames of one direction of a connection; its sender seals them, its receiver checks them.

    Args:
        key: see `session_key`.
        sender: "server" or "client".
    """

    def __init__(self, key: bytes, sender: str) -> None:
        self._key = key
        self._sender = sender.encode()
        self._next = 0

    def seal(self, message: bytes) -> bytes:
        """The next frame."""
        return HEADER.pack(len(message), self._mac(message)) + message

    def unseal(self, message: bytes, mac: bytes) -> bytes:
        """The message. Raises Forged unless it is the next one of that side."""
        if not hmac.compare_digest(mac, self._mac(message)):
            raise Forged("a message does not have the MAC of this run's token")
        return message

    def _mac(self, message: bytes) -> bytes:
        mac = hmac.digest(self._key, b"%s %d " % (self._sender, self._next) + message, "sha256")
        self._next += 1
        return mac
