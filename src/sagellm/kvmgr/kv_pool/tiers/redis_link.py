"""Calls over the Redis protocol, each with a time limit.

`redis` limits the time of each read, so a server that sends a byte now and then would hold a thread for
hours. Here the time that a call has left limits each read and write. Resolving a name is left to the system,
which has limits of its own. Protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from sagellm.core.clock import MonotonicClock
from sagellm.core.errors import ConfigError, MissingExtraError, nearest
from sagellm.kvmgr.kv_pool.tiers.circuit_breaker import CircuitBreaker

if TYPE_CHECKING:
    import redis

Command: TypeAlias = tuple[str | bytes | int, ...]
Execute: TypeAlias = Callable[[Sequence[Command]], list[Any]]

FORMS = "redis://HOST, redis://:PASSWORD@HOST:PORT/DB, rediss://USER:PASSWORD@HOST (TLS), unix:///PATH?db=0"
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where the server is. `shown` is for people and holds no password; `options` are for `redis`."""

    shown: str
    scheme: str
    options: dict[str, Any] = field(repr=False)

    @property
    def password(self) -> str:
        return str(self.options.get("password", ""))

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Raises `ConfigError` that says what would have worked, and repeats no password."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _wrong("it cannot be read") from None
        scheme = parts.scheme
        if scheme not in ("redis", "rediss", "unix"):
            raise _wrong(
                f"the scheme must be redis, rediss or unix, not {scheme!r}" if scheme else "no scheme"
            )
        if parts.fragment:
            raise _wrong("there is a # in it")
        options: dict[str, Any] = {}
        if scheme == "unix":
            if not parts.path.startswith("/") or len(parts.path) < 2:
                raise _wrong("unix needs the absolute path of a socket")
            options["path"] = unquote(parts.path)
            place, db = f"unix://{parts.path}", "0"
        else:
            if not parts.hostname:
                raise _wrong("no host")
            options["host"] = parts.hostname
            if port is not None:
                options["port"] = port
            place = f"{scheme}://{parts.hostname}" + (f":{port}" if port is not None else "")
            db = parts.path.strip("/") or "0"
        for name, value in (("username", parts.username), ("password", parts.password)):
            if value:
                options[name] = unquote(value)
        options.update(_query_options(parts.query, scheme, db))
        return cls(f"{place} (db {options['db']})", scheme, options)


def _query_options(query: str, scheme: str, db: str) -> dict[str, str | int]:
    """The number of the database, and the files of TLS."""
    known = ("db", *_FILES) if scheme == "rediss" else ("db",)
    found = {"db": db, **dict(parse_qsl(query))}
    for name, value in found.items():
        if name not in known:
            raise _wrong(f"unknown option {name!r}.{nearest(name, known)}")
        if name in _FILES and not Path(value).is_file():
            raise _wrong(f"{name}: there is no file {value!r}")
    if not (found["db"].isascii() and found["db"].isdigit()):
        raise _wrong("the database must be a number")
    return {**found, "db": int(found["db"])}


def _wrong(what: str) -> ConfigError:
    return ConfigError(
        f"the URL of the remote KV store: {what}. Forms: {FORMS}. In a user name or password, write :/?#@% "
        "as %3A %2F %3F %23 %40 %25."
    )


def import_redis() -> Any:
    """The package `redis`. Raises `MissingExtraError` without it."""
    try:
        import redis
    except ImportError as error:
        raise MissingExtraError("the remote KV store", "tiers", "redis") from error
    return redis


class RedisLink:
    """Calls of one server by many threads. After failures there are none for a while (`breaker`).

    Connections are made when they are needed, and again after they broke; a call never waits for longer than
    its limit. `close` ends them.
    """

    def __init__(self, address: RedisAddress, breaker: CircuitBreaker, connect_timeout_s: float) -> None:
        redis = import_redis()
        self.address = address
        self.breaker = breaker
        self._redis = redis
        self._deadline = _Deadline()
        self._client = _client(address, self._deadline, connect_timeout_s)
        # The last four come out of the parser for answers that are none of the protocol.
        self._errors = (redis.RedisError, OSError, ValueError, TypeError, AttributeError, RecursionError)

    @contextmanager
    def call(self, limit_s: float) -> Iterator[Execute]:
        """Give a function that executes commands in one round trip, all within the limit.

        It returns the replies in order, errors among them as `redis.ResponseError`. Raises `ConnectionError`,
        there or at once, if the server is dead, slow, not allowed now, or answers what is no reply.
        """
        if not self.breaker.allows():
            raise ConnectionError(self.breaker.fault)
        self._deadline.begin(limit_s)
        try:
            yield self._execute
        except ConnectionError as error:
            self.breaker.failed(self._readable(error))
            raise
        self.breaker.worked()

    def is_refusal(self, reply: object) -> bool:
        """Whether the server answered with an error."""
        return isinstance(reply, self._redis.ResponseError)

    def close(self) -> None:
        self._client.connection_pool.disconnect()

    def _execute(self, commands: Sequence[Command]) -> list[Any]:
        if self._deadline.remaining_s() <= 0:
            raise ConnectionError("the time of the call is over")
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
                replies: list[Any] = pipeline.execute(raise_on_error=False)
        except self._errors as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        if len(replies) != len(commands):
            raise ConnectionError(f"{len(replies)} replies to {len(commands)} commands")
        return replies

    def _readable(self, error: Exception) -> str:
        text = f"{self.address.shown}: {error}"
        return text.replace(self.address.password, "***") if self.address.password else text


class _Deadline(threading.local):
    """When the call of this thread has to end."""

    def __init__(self) -> None:
        self._clock = MonotonicClock()  # a socket knows no other
        self._at_s = math.inf

    def begin(self, limit_s: float) -> None:
        self._at_s = self._clock.now() + limit_s

    def remaining_s(self) -> float:
        return self._at_s - self._clock.now()


class _TimedSocket:
    """A socket whose reads and writes end with the call that makes them."""

    def __init__(self, inner: Any, deadline: _Deadline) -> None:
        self._inner = inner
        self._deadline = deadline
        self._timeout_s: float | None = None

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._inner.settimeout(timeout_s)

    def recv(self, *args: Any) -> Any:
        return self._limited().recv(*args)

    def recv_into(self, *args: Any) -> Any:
        return self._limited().recv_into(*args)

    def sendall(self, *args: Any) -> Any:
        return self._limited().sendall(*args)

    def _limited(self) -> Any:
        left_s = self._deadline.remaining_s()
        if left_s <= 0:
            raise TimeoutError("the time of the call is over")
        self._inner.settimeout(min(left_s, math.inf if self._timeout_s is None else self._timeout_s))
        return self._inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _client(address: RedisAddress, deadline: _Deadline, connect_timeout_s: float) -> redis.Redis:
    import redis
    from redis import connection
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    tls: dict[str, Any] = {"ssl_check_hostname": True} if address.scheme == "rediss" else {}
    base: Any = {
        "redis": connection.Connection,
        "rediss": connection.SSLConnection,
        "unix": connection.UnixDomainSocketConnection,
    }[address.scheme]

    class TimedConnection(base):  # type: ignore[misc]
        """Connects within the time that the call has left."""

        socket_timeout: float | None

        def _connect(self) -> Any:
            left_s = max(deadline.remaining_s(), 0.001)
            self.socket_connect_timeout = min(connect_timeout_s, left_s)
            self.socket_timeout = self.socket_connect_timeout  # of the handshake of TLS
            timed = _TimedSocket(super()._connect(), deadline)
            self.socket_timeout = None  # from now on there is the deadline alone
            return timed

    pool = redis.ConnectionPool(
        connection_class=TimedConnection,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=connect_timeout_s,
        socket_connect_timeout=connect_timeout_s,
        **address.options,
        **tls,
    )
    return redis.Redis(connection_pool=pool)
