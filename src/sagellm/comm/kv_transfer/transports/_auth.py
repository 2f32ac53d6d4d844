"""Two sides prove to each other that they have the same key.

Challenge and response with HMAC-SHA256 over fresh numbers of both sides; the side that connects proves first:

    server -> client   MAGIC, server nonce
    client -> server   client nonce, HMAC(key, "client", both nonces, extra), extra
    server -> client   HMAC(key, "server", both nonces, extra)

All messages have fixed sizes. A recorded answer is worth nothing for another nonce, nor as the other side's.
"""

from __future__ import annotations

import hmac
import os

from sagellm.core.errors import ConfigError, KVDataError

MAGIC = b"sageKVt2"
NONCE_BYTES = MAC_BYTES = 32
EXTRA_BYTES = 12
"""Of the transport: what it says of memory that both sides share."""
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES
RESPONSE_BYTES = NONCE_BYTES + MAC_BYTES + EXTRA_BYTES
MIN_KEY_BYTES = 16


def check_key(key: bytes) -> bytes:
    """The key. Raises `ConfigError` for a short one."""
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"the key of KV transfer has {len(key)} bytes: share one of {MIN_KEY_BYTES} random bytes or "
            "more, as `openssl rand -hex 32` makes"
        )
    return key


class ServerAuth:
    """The side that accepts a connection."""

    def __init__(self, key: bytes) -> None:
        self._key, self._nonce = key, os.urandom(NONCE_BYTES)
        self.challenge = MAGIC + self._nonce

    def answer(self, response: bytes) -> tuple[bytes, bytes]:
        """Our proof, and the client's extra. Raises `KVDataError` if it has another key."""
        nonce, mac = response[:NONCE_BYTES], response[NONCE_BYTES : NONCE_BYTES + MAC_BYTES]
        extra = response[NONCE_BYTES + MAC_BYTES :]
        both = self._nonce + nonce + extra
        if not hmac.compare_digest(mac, hmac.digest(self._key, b"client" + both, "sha256")):
            raise KVDataError("a peer connected with another key")
        return hmac.digest(self._key, b"server" + both, "sha256"), extra


class ClientAuth:
    """The side that connects."""

    def __init__(self, key: bytes) -> None:
        self._key, self._nonce = key, os.urandom(NONCE_BYTES)

    def respond(self, challenge: bytes, extra: bytes) -> bytes:
        """Our proof. Raises `KVDataError` if the other side is no KV transfer."""
        if challenge[: len(MAGIC)] != MAGIC:
            raise KVDataError("what answers there is no KV transfer of this version")
        self._both = challenge[len(MAGIC) :] + self._nonce + extra
        return self._nonce + hmac.digest(self._key, b"client" + self._both, "sha256") + extra

    def check(self, proof: bytes) -> None:
        """Raises `KVDataError` if the server has another key."""
        if not hmac.compare_digest(proof, hmac.digest(self._key, b"server" + self._both, "sha256")):
            raise KVDataError("the peer has another key")
