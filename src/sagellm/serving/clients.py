"""The client of a request, and the limits of each client."""

from __future__ import annotations

import ipaddress
import math
from collections import Counter

from fastapi import Request

from sagellm.core.config import ServerConfig
from sagellm.core.errors import RequestError
from sagellm.serving.errors import OverloadedError

MAX_USER_CHARS = 256
IPV6_PREFIX = 64
"""Bits of an IPv6 address that identify a client: one host has all addresses of such a network."""

Client = tuple[str, ...]
"""API key or address, then the end user that the request names ("" for none)."""
NO_CLIENT: Client = ("", "")


def allowed_priority(settings: ServerConfig, priority: int | None, service_tier: str | None) -> int:
    """The request's priority plus its service tier's, at most `max_priority`.

    A tier that would exceed the limit gets the limit, as OpenAI serves a tier that a project does not have. A
    number that exceeds it raises `RequestError`, since a client that sends one relies on it.
    """
    asked = (priority or 0) + settings.tier_priorities.get(service_tier or "", 0)
    limit = settings.max_priority
    if limit is None or asked <= limit:
        return asked
    if priority and priority > limit:
        allowed = f"at most {limit} is allowed on this server (server.max_priority)"
        order = "requests with a higher number are served first"
        raise RequestError(f"priority is {priority}; {allowed}, and {order}: leave it out", "priority")
    return limit


def client_of(request: Request, user: str | None, *, trust_user: bool = False) -> Client:
    """The client of a request, by the name of its key or its address.

    With `trust_user`, the end user alone where the request names one: a gateway in front has checked it.
    """
    user = (user or "")[:MAX_USER_CHARS]
    if trust_user and user:
        return (f"user {user}", "")
    name = getattr(request.state, "key_name", "")
    host = request.client.host if request.client is not None else ""
    return (f"key {name}" if name else f"address {_network(host)}", user)


def _network(host: str) -> str:
    """An address; of an IPv6 address, its network."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # the path of a Unix socket
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))


class ClientLoad:
    """Counts waiting sequences and the tokens of open requests, in all and by client.

    A sequence waits until its first token. Both are counted for a client as a whole (key or address), waiting
    sequences also for each end user. The limits are those of `settings`.
    """

    def __init__(self, settings: ServerConfig) -> None:
        self.settings = settings
        self.num_waiting = 0
        self._waiting: Counter[Client] = Counter()
        self._tokens: Counter[str] = Counter()

    @property
    def most_of_one_client(self) -> int:
        """Sequences of one client that may wait while there is no other client."""
        return math.ceil(self.settings.client_waiting_share * self.settings.max_waiting)

    def check_waiting(self, client: Client, num_sequences: int) -> None:
        """Raise `OverloadedError` unless so many more sequences of the client may wait now.

        A client, and an end user of it, gets `client_waiting_share` of the places that others leave free. So
        there is always a place for a client that comes later.
        """
        room, around = self.settings.max_waiting, self.num_waiting
        if around + num_sequences > room:
            raise OverloadedError(f"{around} of at most {room} sequences wait: try again later")
        for path in _levels(client):
            own = self._waiting[path]
            room = math.ceil(self.settings.client_waiting_share * (room - (around - own)))
            if own + num_sequences > room:
                used = f"{own} of your sequences wait, and at most {room} may"
                raise OverloadedError(
                    f"{used} while others leave room (server.client_waiting_share): try again later"
                )
            around = own

    def check_tokens(self, client: Client, num_tokens: int, max_model_len: int) -> None:
        """Refuse a request for its tokens: the prompts plus `n` times `max_tokens`.

        Raises `RequestError` for one that could never run; an answer that fills the context always can.
        Raises `OverloadedError` if open requests leave the client too few tokens.
        """
        for name in ("max_request_tokens", "max_client_tokens"):
            limit = getattr(self.settings, name)
            if limit is not None and num_tokens > max(limit, max_model_len):
                asked = f"the prompts and n times max_tokens are {num_tokens} tokens"
                allowed = f"at most {max(limit, max_model_len)} are allowed in one request (server.{name})"
                raise RequestError(f"{asked}; {allowed}: send a smaller n or max_tokens", "max_tokens")
        limit, used = self.settings.max_client_tokens, self._tokens[client[0]]
        if limit is not None and used and used + num_tokens > limit:
            asked = f"your open requests may generate or hold {used} tokens, this one {num_tokens}"
            raise OverloadedError(
                f"{asked}; at most {limit} are allowed together (server.max_client_tokens): "
                "try again when one has ended"
            )

    def enter(self, client: Client, num_sequences: int, num_tokens: int) -> None:
        """Count a new request, whose sequences wait."""
        self._wait(client, num_sequences)
        self._tokens[client[0]] += num_tokens

    def start(self, client: Client, num_sequences: int) -> None:
        """Count sequences as no longer waiting."""
        self._wait(client, -num_sequences)

    def leave(self, client: Client, num_tokens: int) -> None:
        """Count a request as ended; `start` was called before."""
        self._tokens[client[0]] -= num_tokens
        if not self._tokens[client[0]]:
            del self._tokens[client[0]]

    def check(self) -> None:
        """Raise `AssertionError` if the counts contradict each other."""
        wholes = [count for path, count in self._waiting.items() if len(path) == 1]
        assert sum(wholes) == self.num_waiting
        assert min([0, *self._waiting.values(), *self._tokens.values()]) == 0
        for path, count in self._waiting.items():
            assert count <= self._waiting[path[:1]], path

    def _wait(self, client: Client, num_sequences: int) -> None:
        self.num_waiting += num_sequences
        for path in _levels(client):
            self._waiting[path] += num_sequences
            if not self._waiting[path]:
                del self._waiting[path]


def _levels(client: Client) -> list[Client]:
    """The client as a whole, and its end user if it names one."""
    return [client[:1], client] if client[1] else [client[:1]]
