"""The keys of a fleet: everything between its processes is encrypted by CurveZMQ.

One shared key gives the instances' long-term key pair. A front must know its public half to say the first
word (CurveZMQ's HELLO is a box for it), and it is never sent: without the shared key nothing is
reached. Source of the handshake: CurveZMQ, rfc.zeromq.org/spec/26.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import zmq
from zmq.utils import z85

from sagellm.core.errors import ConfigError

LEAST_CHARACTERS = 16
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, repr=False)
class FleetKey:
    """A shared key. Raises `ConfigError` for one that can be guessed."""

    text: str

    def __post_init__(self) -> None:
        if len(self.text) < LEAST_CHARACTERS:
            raise ConfigError(
                f"the key of a fleet has at least {LEAST_CHARACTERS} characters; this makes one: "
                'python -c "import secrets; print(secrets.token_urlsafe(32))"'
            )

    @classmethod
    def new(cls) -> FleetKey:
        return cls(secrets.token_urlsafe(_KEY_BYTES))

    @classmethod
    def read(cls, path: Path) -> FleetKey:
        """From a file. Raises `ConfigError` if it cannot be read."""
        try:
            return cls(path.read_text().strip())
        except OSError as error:
            raise ConfigError(f"the fleet's key cannot be read from {path}: {error.strerror}") from error

    def secure_server(self, socket: zmq.SyncSocket) -> None:
        """Before `bind`."""
        socket.curve_secretkey = self._secret
        socket.curve_publickey = zmq.curve_public(self._secret)
        socket.curve_server = True

    def secure_client(self, socket: zmq.SyncSocket) -> None:
        """Before `connect`."""
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = zmq.curve_public(self._secret)

    @property
    def _secret(self) -> bytes:
        digest = blake2b(self.text.encode(), digest_size=_KEY_BYTES, person=b"sagellm-fleet").digest()
        return z85.encode(digest)
