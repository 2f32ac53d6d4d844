"""`RemoteStore` on a real redis-server, and on a small server that fails on request.

The real server is Debian's `redis-server`; where it is not installed, its tests are skipped.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError, ConfigError, MissingExtraError
from sagellm.core.protocols.kv_tiers import HEADER_BYTES, BlockFormat, BlockHeader, ReadOutcome, StoredBlock
from sagellm.core.types import Namespace
from sagellm.kvmgr.kv_pool.tiers.codecs import CODECS
from sagellm.kvmgr.kv_pool.tiers.remote import PutOutcome, RemoteOptions, RemoteStore
from tests.kvmgr.tiers.storages.resp_server import RespServer
from tests.redis_server import running_redis

SIZE = 4096
FORMAT = BlockFormat(b"f" * 16, SIZE)
OTHER = BlockFormat(b"g" * 16, SIZE)
HASHES = [bytes((number,)) * 32 for number in range(8)]
OK, ABSENT, CORRUPT, IO_ERROR = (
    ReadOutcome.OK, ReadOutcome.ABSENT, ReadOutcome.CORRUPT, ReadOutcome.IO_ERROR,
)  # fmt: skip
NO_SERVER = "redis://127.0.0.1:1"
SECRET = "s3cr%t:/?#@"
QUOTED = "s3cr%25t%3A%2F%3F%23%40"


def block_of(token_hash: bytes) -> bytes:
    return (token_hash[:1] + b"\x3c") * (SIZE // 2)


def key_of(token_hash: bytes, block_format: BlockFormat = FORMAT) -> bytes:
    return f"sagellm:{block_format.digest.hex()}:{token_hash.hex()}".encode()


def put(store: RemoteStore, hashes: list[bytes]) -> list[PutOutcome]:
    blocks = [StoredBlock(0, token_hash, b"", Namespace(), b"", 0.0) for token_hash in hashes]
    outcomes = list(store.put(blocks, b"".join(map(block_of, hashes))))
    store.check()
    return outcomes


def get(store: RemoteStore, hashes: list[bytes]) -> list[ReadOutcome]:
    """Read blocks; those that are OK must be the right ones."""
    target = bytearray(SIZE * len(hashes))
    outcomes = list(store.get(hashes, memoryview(target)))
    store.check()
    for number, (token_hash, outcome) in enumerate(zip(hashes, outcomes, strict=True)):
        if outcome is OK:
            assert target[number * SIZE : (number + 1) * SIZE] == block_of(token_hash)
    return outcomes


Made = Callable[..., RemoteStore]


@pytest.fixture
def make() -> Iterator[Made]:
    """Makes stores, and closes them."""
    made: list[RemoteStore] = []

    def store(
        url: str, block_format: BlockFormat = FORMAT, codec: Any = None, clock: Any = None, **options: Any
    ) -> RemoteStore:
        options.setdefault("call_timeout_s", 20.0)  # other tests may use the machine
        made.append(RemoteStore(RemoteOptions(url, **options), block_format, codec, clock=clock))
        return made[-1]

    yield store
    for opened in made:
        opened.close()


@pytest.fixture
def server() -> Iterator[RespServer]:
    server = RespServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def redis_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with running_redis(tmp_path_factory.mktemp("redis")) as path:
        yield path


@pytest.fixture
def real(redis_socket: Path) -> Iterator[redis.Redis]:
    client = redis.Redis(unix_socket_path=str(redis_socket))
    client.flushall()
    yield client
    client.config_set("maxmemory", 0)
    client.close()


@pytest.fixture(params=["small server", "redis-server"])
def url(request: pytest.FixtureRequest) -> str:
    """Of a server that works."""
    if request.param == "redis-server":
        request.getfixturevalue("real")
        return f"unix://{request.getfixturevalue('redis_socket')}"
    server: RespServer = request.getfixturevalue("server")
    return server.url


# -- a server that works


@pytest.mark.parametrize("codec", [None, "raw", "zstd"])
def test_two_instances_share_blocks(url: str, make: Made, codec: str | None) -> None:
    made = CODECS.create(codec, dtype="float16") if codec else None
    first, second = make(url, codec=made), make(url, codec=made)
    assert put(first, HASHES[:3]) == [PutOutcome.STORED] * 3
    assert second.contains(HASHES[:5]) == [True, True, True, False, False]
    assert get(second, [HASHES[4], *HASHES[:3]]) == [ABSENT, OK, OK, OK]
    assert put(second, HASHES[2:5]) == [PutOutcome.PRESENT, PutOutcome.STORED, PutOutcome.STORED]
    assert get(first, HASHES[:6]) == [*[OK] * 5, ABSENT]
    assert first.num_reads == {OK: 5, ABSENT: 1}
    assert second.num_puts == {PutOutcome.PRESENT: 1, PutOutcome.STORED: 2}
    assert first.fault is second.fault is None


def test_more_blocks_than_a_chunk(url: str, make: Made) -> None:
    store = make(url)
    hashes = [number.to_bytes(32, "big") for number in range(1100)]
    assert set(put(store, hashes)) == {PutOutcome.STORED}
    assert store.contains(hashes) == [True] * 1100
    assert set(get(store, hashes)) == {OK}


def test_no_blocks(url: str, make: Made) -> None:
    store = make(url)
    assert (put(store, []), get(store, []), store.contains([])) == ([], [], [])


def test_another_format_never_hits(url: str, make: Made) -> None:
    assert set(put(make(url), HASHES)) == {PutOutcome.STORED}
    other = make(url, OTHER)
    assert other.contains(HASHES) == [False] * len(HASHES)
    assert set(get(other, HASHES)) == {ABSENT}


def test_blocks_go_after_their_time_and_use_prolongs_it(server: RespServer, make: Made) -> None:
    store = make(server.url, ttl_s=60.0)
    put(store, HASHES[:3])
    for _ in range(4):
        server.clock.advance(25)
        assert get(store, HASHES[:1]) == [OK]
        assert put(store, HASHES[1:2]) == [PutOutcome.PRESENT]
    assert get(store, HASHES[:3]) == [OK, OK, ABSENT]
    server.clock.advance(60)
    assert get(store, HASHES[:2]) == [ABSENT, ABSENT]


def test_a_real_server_ends_blocks_too(redis_socket: Path, real: redis.Redis, make: Made) -> None:
    url = f"unix://{redis_socket}"
    brief, store = make(url, ttl_s=0.05), make(url, ttl_s=60.0)
    put(brief, HASHES[:1])
    put(store, HASHES[1:3])
    real.pexpire(key_of(HASHES[1]), 20_000)
    real.pexpire(key_of(HASHES[2]), 20_000)
    time.sleep(0.1)
    assert get(store, HASHES[:2]) == [ABSENT, OK]
    assert put(store, HASHES[2:3]) == [PutOutcome.PRESENT]
    for token_hash in HASHES[1:3]:
        assert 40_000 < real.pttl(key_of(token_hash)) <= 60_000


def test_a_block_in_a_codec_that_is_not_ours_is_a_miss_and_stays(url: str, make: Made) -> None:
    compressed = make(url, codec=CODECS.create("zstd", dtype="float16"))
    put(compressed, HASHES[:1])
    plain = make(url)
    assert get(plain, HASHES[:1]) == [ReadOutcome.UNKNOWN_CODEC]
    assert put(plain, HASHES[:1]) == [PutOutcome.PRESENT]
    assert get(compressed, HASHES[:1]) == [OK]


def test_what_a_codec_makes_larger_is_stored_as_it_is(server: RespServer, make: Made) -> None:
    store = make(server.url, codec=CODECS.create("zstd", dtype="float16"))
    noise = b"".join(xxhash.xxh3_64_digest(number.to_bytes(2, "big")) for number in range(SIZE // 8))
    store.put([StoredBlock(0, HASHES[0], b"", Namespace(), b"", 0.0)], noise)
    assert BlockHeader.unpack(server.data[key_of(HASHES[0])][0]).codec == "raw"
    target = bytearray(SIZE)
    assert store.get(HASHES[:1], memoryview(target)) == [OK]
    assert target == noise


@pytest.fixture(scope="module")
def lasting() -> Iterator[tuple[RespServer, RemoteStore]]:
    """A server and a store for many examples."""
    server = RespServer()
    server.start()
    store = RemoteStore(RemoteOptions(server.url, max_failures=10_000), FORMAT)
    yield server, store
    store.close()
    server.stop()


@given(at=st.integers(0, SIZE + HEADER_BYTES - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found(lasting: tuple[RespServer, RemoteStore], at: int, bit: int) -> None:
    """In the payload and the header; the padding between them says nothing."""
    server, store = lasting
    put(store, HASHES[:2])
    value, end_s = server.data[key_of(HASHES[0])]
    damaged = bytearray(value)
    damaged[at] ^= 1 << bit
    server.data[key_of(HASHES[0])] = bytes(damaged), end_s
    is_padding = 112 <= at < HEADER_BYTES
    assert get(store, HASHES[:2]) == [OK if is_padding else CORRUPT, OK]
    assert (key_of(HASHES[0]) in server.data) == is_padding


def test_a_damaged_block_is_deleted_and_can_be_put_again(
    redis_socket: Path, real: redis.Redis, make: Made
) -> None:
    store = make(f"unix://{redis_socket}")
    put(store, HASHES[:2])
    real.setrange(key_of(HASHES[0]), HEADER_BYTES + 100, b"!")
    assert get(store, HASHES[:2]) == [CORRUPT, OK]
    assert store.num_deleted == 1
    assert not real.exists(key_of(HASHES[0]))
    assert get(store, HASHES[:2]) == [ABSENT, OK]
    assert put(store, HASHES[:2]) == [PutOutcome.STORED, PutOutcome.PRESENT]
    assert get(store, HASHES[:2]) == [OK, OK]


def header_of(token_hash: bytes, **changes: Any) -> BlockHeader:
    block = block_of(token_hash)
    header = BlockHeader(FORMAT.digest, token_hash, "raw", SIZE, xxhash.xxh3_64_intdigest(block))
    return replace(header, **changes)


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (header_of(HASHES[0], version=2).pack() + block_of(HASHES[0]), ReadOutcome.OTHER_VERSION),
        (
            header_of(HASHES[0], format_digest=b"x" * 16).pack() + block_of(HASHES[0]),
            ReadOutcome.OTHER_FORMAT,
        ),
        (header_of(HASHES[1]).pack() + block_of(HASHES[1]), ReadOutcome.OTHER_TOKENS),
        (header_of(HASHES[0]).pack() + block_of(HASHES[0])[:-1], CORRUPT),
        (header_of(HASHES[0]).pack() + block_of(HASHES[0]) + b"!", CORRUPT),
        (header_of(HASHES[0]).pack(), CORRUPT),
        (header_of(HASHES[0], num_bytes=2, checksum=xxhash.xxh3_64_intdigest(b"ab")).pack() + b"ab", CORRUPT),
        (b"", CORRUPT),
        (b"anything", CORRUPT),
    ],
)
def test_what_does_not_verify_is_counted_and_deleted(
    server: RespServer, make: Made, value: bytes, outcome: ReadOutcome
) -> None:
    store = make(server.url)
    server.data[key_of(HASHES[0])] = value, 60.0
    assert get(store, HASHES[:2]) == [outcome, ABSENT]
    assert store.num_reads[outcome] == store.num_deleted == 1
    assert not server.data


def test_a_damaged_codec_is_a_miss(server: RespServer, make: Made) -> None:
    store = make(server.url, codec=CODECS.create("zstd", dtype="float16"))
    header = header_of(HASHES[0], codec="zstd", num_bytes=3, checksum=xxhash.xxh3_64_intdigest(b"bad"))
    server.data[key_of(HASHES[0])] = header.pack() + b"bad", 60.0
    assert get(store, HASHES[:1]) == [CORRUPT]


def test_many_threads(url: str, make: Made) -> None:
    store, outcomes = make(url), []

    def work(number: int) -> None:
        hashes = [bytes((number % 4, step)) * 16 for step in range(20)]
        put(store, hashes)
        outcomes.extend(get(store, hashes))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [OK] * 160
    assert store.num_puts[PutOutcome.STORED] == 80


# -- servers that fail


def test_a_dead_server_is_a_miss_and_left_alone(make: Made) -> None:
    store = make(NO_SERVER, clock=ManualClock())
    for _ in range(3):
        assert store.fault is None
        assert get(store, HASHES[:2]) == [IO_ERROR] * 2
    assert store.fault
    assert "refused" in store.fault
    assert store.contains(HASHES) is None
    assert put(store, HASHES[:2]) == [PutOutcome.IO_ERROR] * 2


def test_the_breaker_opens_and_one_probe_closes_it(server: RespServer, make: Made) -> None:
    clock = ManualClock()
    store = make(server.url, clock=clock, max_failures=2, first_backoff_s=1.0)
    put(store, HASHES[:1])
    server.stop()
    for _ in range(2):
        assert get(store, HASHES[:1]) == [IO_ERROR]
    server.start()
    num_commands = len(server.commands)
    assert get(store, HASHES[:1]) == [IO_ERROR]
    assert len(server.commands) == num_commands
    clock.advance(1.01)
    assert get(store, HASHES[:1]) == [OK]
    assert store.fault is None
    assert get(store, HASHES[:1]) == [OK]


def test_it_connects_again_by_itself(server: RespServer, make: Made) -> None:
    store = make(server.url)
    put(store, HASHES[:1])
    server.stop()
    time.sleep(0.05)
    server.start()
    assert get(store, HASHES[:1]) == [OK]
    assert server.num_connections == 2


def test_a_server_that_dies_in_the_middle(server: RespServer, make: Made) -> None:
    """What came before its end is used, the rest is a miss."""
    store = make(server.url)
    hashes = [number.to_bytes(32, "big") for number in range(600)]
    put(store, hashes)
    per_chunk = (1 << 20) // SIZE
    server.max_replies = per_chunk + 1
    outcomes = get(store, hashes)
    assert outcomes == [OK] * per_chunk + [IO_ERROR] * (600 - per_chunk)
    server.max_replies = None
    assert set(get(store, hashes)) == {OK}


def test_a_server_that_dies_while_it_is_written_to(server: RespServer, make: Made) -> None:
    store = make(server.url)
    server.max_replies = 8 + 3
    assert put(store, HASHES) == [PutOutcome.IO_ERROR] * 8
    server.max_replies = None
    assert put(store, HASHES) == [PutOutcome.PRESENT] * 4 + [PutOutcome.STORED] * 4


@pytest.mark.parametrize("fault", ["delay_s", "trickle_s"])
@pytest.mark.parametrize("operation", ["get", "put", "contains"])
def test_a_slow_server_does_not_hold_a_call(
    server: RespServer, make: Made, fault: str, operation: str
) -> None:
    """Neither one that is silent, nor one that sends a byte now and then."""
    store = make(server.url, call_timeout_s=0.3, connect_timeout_s=0.2, min_bytes_per_s=1e9)
    put(store, HASHES[:2])
    setattr(server, fault, 10.0 if fault == "delay_s" else 0.1)
    began_s = time.monotonic()
    if operation == "get":
        assert get(store, HASHES[:2]) == [IO_ERROR] * 2
    elif operation == "put":
        assert put(store, HASHES) == [PutOutcome.IO_ERROR] * 8
    else:
        assert store.contains(HASHES) is None
    assert time.monotonic() - began_s < 2.0


def test_a_server_that_accepts_and_says_nothing(make: Made) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = make(f"redis://127.0.0.1:{silent.getsockname()[1]}", call_timeout_s=0.2)
        began_s = time.monotonic()
        assert get(store, HASHES[:1]) == [IO_ERROR]
        assert time.monotonic() - began_s < 2.0


@pytest.mark.parametrize(
    "answer",
    [
        b"-ERR no\r\n", b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"*1\r\n:1\r\n", b"$-7\r\n",
        b"$x\r\n", b":x\r\n", b"*x\r\n", b"?\r\n", b"\r\n", b"*1\r\n" * 3000 + b":1\r\n",
        b"*2\r\n*0\r\n-E\r\n",
        b"-LOADING Redis is loading the dataset in memory\r\n", b"-NOPERM no permission\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$99999999999\r\nabc", b"\xff\xfe\r\n" * 9, b"-MOVED x\r\n",
        b"-READONLY You can't write against a read only replica.\r\n", b"-ASK\r\n", b"-\r\n",
    ],
)  # fmt: skip
def test_no_answer_raises(server: RespServer, make: Made, answer: bytes) -> None:
    store = make(server.url, call_timeout_s=0.2, max_failures=100)
    server.answer = answer
    assert OK not in get(store, HASHES[:2])
    store.contains(HASHES[:2])
    put(store, HASHES[:2])
    server.answer = None
    assert OK not in get(store, HASHES[6:])


@given(st.binary(max_size=200))
def test_no_bytes_raise(lasting: tuple[RespServer, RemoteStore], answer: bytes) -> None:
    server, _ = lasting
    server.answer = answer
    store = RemoteStore(RemoteOptions(server.url, call_timeout_s=0.02, max_failures=100), FORMAT)
    assert OK not in get(store, HASHES[:2])
    store.contains(HASHES[:2])
    put(store, HASHES[:2])
    store.close()
    server.answer = None


def test_a_full_server_stops_writes_for_a_while_and_no_reads(
    redis_socket: Path, real: redis.Redis, make: Made
) -> None:
    clock = ManualClock()
    store = make(f"unix://{redis_socket}", clock=clock, first_backoff_s=1.0)
    put(store, HASHES[:1])
    real.config_set("maxmemory", 1)
    assert put(store, HASHES[:2]) == [PutOutcome.PRESENT, PutOutcome.REFUSED]
    assert "maxmemory" in str(store.write_fault)
    assert (store.fault, store.takes_blocks) == (None, False)
    assert put(store, HASHES[1:2]) == [PutOutcome.REFUSED]
    assert get(store, HASHES[:2]) == [OK, ABSENT]
    real.config_set("maxmemory", 0)
    clock.advance(1.01)
    assert store.takes_blocks
    assert put(store, HASHES[1:2]) == [PutOutcome.STORED]
    assert store.write_fault is None


def test_a_full_small_server(server: RespServer, make: Made) -> None:
    store = make(server.url)
    server.refuse_writes = True
    assert put(store, HASHES[:2]) == [PutOutcome.REFUSED] * 2
    assert "maxmemory" in str(store.write_fault)


@pytest.mark.parametrize("left", ["present", "over budget"])
def test_a_write_probe_without_a_block_to_send_ends(server: RespServer, make: Made, left: str) -> None:
    clock = ManualClock()
    most = 2 * (SIZE + HEADER_BYTES)
    store = make(server.url, clock=clock, first_backoff_s=1.0, max_put_bytes=most, ttl_s=1000.0)
    put(store, HASHES[:1])
    server.refuse_writes = True
    put(store, HASHES[1:2])
    asked = HASHES[:1] if left == "present" else HASHES[2:3]
    for works in (False, True):
        server.refuse_writes = not works
        clock.advance(10.0)
        assert put(store, asked) == [PutOutcome.PRESENT if left == "present" else PutOutcome.OVER_BUDGET]
        assert bool(store.write_fault) is not works
    assert store.takes_blocks
    assert not any(value == b"" for value, ends_s in server.data.values() if ends_s > clock.now() + 0.001)


def test_the_size_limit(server: RespServer, make: Made) -> None:
    clock = ManualClock()
    limit = 600 * (SIZE + HEADER_BYTES)
    store = make(server.url, clock=clock, max_put_bytes=limit, max_put_bytes_per_s=1 << 40, ttl_s=1000.0)
    hashes = [number.to_bytes(32, "big") for number in range(1000)]
    outcomes = put(store, hashes)
    assert outcomes == [PutOutcome.STORED] * 600 + [PutOutcome.OVER_BUDGET] * 400
    assert sum(len(value) for value, _ in server.data.values()) == limit
    clock.advance(990)
    assert put(store, hashes[599:601]) == [PutOutcome.PRESENT, PutOutcome.OVER_BUDGET]
    clock.advance(30)
    assert put(store, hashes[900:]) == [PutOutcome.STORED] * 100
    assert store.fault is None


def test_the_rate_limit(server: RespServer, make: Made) -> None:
    clock = ManualClock()
    store = make(server.url, clock=clock, max_put_bytes_per_s=2 * (SIZE + HEADER_BYTES))
    outcomes = []
    for token_hash in HASHES[:4]:
        outcomes += put(store, [token_hash])
        clock.advance(0.3)
    assert outcomes == [*[PutOutcome.STORED] * 2, *[PutOutcome.OVER_BUDGET] * 2]
    assert put(store, HASHES[2:3]) == [PutOutcome.STORED]


def test_a_closed_store_is_a_miss(server: RespServer, make: Made) -> None:
    store = make(server.url)
    put(store, HASHES[:1])
    store.close()
    assert get(store, HASHES[:1]) == [IO_ERROR]
    assert store.contains(HASHES[:1]) is None
    assert put(store, HASHES[:1]) == [PutOutcome.IO_ERROR]


# -- passwords, addresses, options


@pytest.mark.parametrize("url", ["redis://:{}@127.0.0.1:{}", "redis://user:{}@127.0.0.1:{}/0"])
def test_the_password_is_used_and_never_shown(make: Made, url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = RespServer(SECRET)
    server.start()
    right = make(url.format(QUOTED, server.port))
    assert put(right, HASHES[:1]) == [PutOutcome.STORED]
    wrong = make(url.format("wrong-one", server.port))
    missing = make(server.url)
    for store in (wrong, missing):
        for _ in range(3):
            assert get(store, HASHES[:1]) == [IO_ERROR]
        assert store.fault
    assert "password" in str(wrong.fault)
    assert "Authentication required" in str(missing.fault)
    options = RemoteOptions(url.format(QUOTED, server.port))
    shown = f"{wrong.fault} {caplog.text} {options!r} {right!r} {right._link.address!r}"
    for text in (SECRET, QUOTED, "wrong-one"):
        assert text not in shown
    server.stop()


def test_a_server_that_repeats_the_password(make: Made) -> None:
    server = RespServer()
    server.start()
    server.answer = b"-ERR your password is hunter22\r\n"
    store = make(server.url.replace("//", "//:hunter22@"), max_failures=1)
    assert store.contains(HASHES[:1]) is None
    assert "your password is ***" in str(store.fault)
    server.stop()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("", "no scheme"),
        ("127.0.0.1", "no scheme"),
        ("http://host", "must be redis, rediss or unix, not 'http'"),
        ("redis://", "no host"),
        ("redis:///0", "no host"),
        ("redis://:hunter22@:1", "no host"),
        ("redis://:hunter22@host:many", "cannot be read"),
        ("redis://:hunter22@host:70000", "cannot be read"),
        ("redis://:hunt#er22@host", "cannot be read"),
        ("redis://user:hunt/er22@host", "cannot be read"),
        ("redis://[::1", "cannot be read"),
        ("redis://host#hunter22", "there is a # in it"),
        ("redis://host/one", "must be a number"),
        ("redis://host?db=-1", "must be a number"),
        ("redis://host?socket_timeout=9", "unknown option 'socket_timeout'"),
        ("redis://host?ssl_certfile=x", "unknown option 'ssl_certfile'"),
        ("rediss://host?ssl_ca_certs=/no/such/file", "there is no file"),
        ("unix://", "absolute path"),
        ("unix://relative", "absolute path"),
    ],
)
def test_a_wrong_url_is_explained(url: str, expected: str) -> None:
    with pytest.raises(ConfigError, match="the URL of the remote KV store") as raised:
        RemoteStore(RemoteOptions(url), FORMAT)
    message = str(raised.value)
    assert expected in message
    assert "unix:///PATH" in message
    assert "hunt" not in message


def test_tls_to_a_server_without_it_is_a_miss(server: RespServer, make: Made) -> None:
    store = make(server.url.replace("redis:", "rediss:"), call_timeout_s=0.5, max_failures=1)
    assert get(store, HASHES[:1]) == [IO_ERROR]
    assert store.fault


@pytest.mark.parametrize(
    "options",
    [
        {"ttl_s": 0.0},
        {"max_failures": 0},
        {"first_backoff_s": 2.0, "max_backoff_s": 1.0},
        {"max_put_bytes": 9},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"remote KV store: (max_|ttl_s)"):
        RemoteStore(RemoteOptions(NO_SERVER, **options), FORMAT)


def test_memory_of_another_size_is_a_bug_of_the_caller(make: Made) -> None:
    store = make(NO_SERVER)
    with pytest.raises(BookkeepingError, match="100 bytes of memory for blocks of 4096"):
        store.get(HASHES[:1], memoryview(bytearray(100)))
    with pytest.raises(BookkeepingError, match="100 bytes of memory for blocks of 0"):
        store.put([], bytes(100))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"redis, which is not installed: .*\[tiers\]"):
        RemoteStore(RemoteOptions(NO_SERVER), FORMAT)
