"""vLLM itself on the other side. `SAGELLM_PEER_VLLM` names the interpreter of an environment that has it."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from sagellm.control_plane.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventSubscriber,
    ReceivedBatch,
    WireForm,
    encode_batch,
    salt_digest,
    to_wire,
)
from sagellm.control_plane.kv_events.codec import KVEvent
from sagellm.core.events import BlocksRemoved, BlocksStored, IndexCleared
from sagellm.core.types import Namespace, Tokens

pytestmark = pytest.mark.peer

READ = """
import json, sys, msgspec
from vllm.distributed.kv_events import KVEventBatch
batch = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.read()), type=KVEventBatch)
fields = [{"type": type(event).__name__} | msgspec.structs.asdict(event) for event in batch.events]
as_text = lambda value: value.hex() if isinstance(value, bytes) else value
print("RESULT" + json.dumps([batch.ts, fields, batch.data_parallel_rank], default=as_text))
print("BYTES" + msgspec.msgpack.encode(batch).hex())
"""

SPEAK = """
import sys, zmq
from vllm.distributed.kv_events import *
publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:*", "ipc://" + sys.argv[1], topic="kv")
for number in range(3):
    publisher.publish(KVEventBatch(ts=1.0 + number, events=[
        BlockStored([bytes([number]) * 32], None, [number, 7], 2, None, "GPU", None, group_idx=0),
        BlockRemoved([number], "GPU"), AllBlocksCleared()]))
print("ENDPOINT" + publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
sys.stdin.read()
publisher.shutdown()
"""


@pytest.fixture(scope="module")
def vllm_python() -> str:
    named = os.environ.get("SAGELLM_PEER_VLLM")
    if not named:
        pytest.skip("SAGELLM_PEER_VLLM is not set")
    return named


def marked(output: str, mark: str) -> str:
    return next(line.removeprefix(mark) for line in output.splitlines() if line.startswith(mark))


def test_vllm_reads_what_we_write(vllm_python: str) -> None:
    tokens = Tokens([1, 2, 3, 4]).tobytes()
    space = Namespace("acme", "model", "poet", "float16")
    happened: list[KVEvent] = [
        BlocksStored((1, 2), 0, (b"a" * 32, b"b" * 32), None, tokens, space),
        BlocksRemoved((2,), "capacity", (b"b" * 32,), space),
        IndexCleared(),
    ]
    payload = encode_batch(KVEventBatch(1.5, [to_wire(event, WireForm(2)) for event in happened], 0))
    done = subprocess.run(
        [vllm_python, "-c", READ], input=payload.hex(), capture_output=True, text=True, check=True
    )
    ts, (stored, removed, cleared), rank = json.loads(marked(done.stdout, "RESULT"))
    assert (ts, rank) == (1.5, 0)
    assert stored["block_hashes"] == [(b"a" * 32).hex(), (b"b" * 32).hex()]
    assert stored["token_ids"] == [1, 2, 3, 4]
    assert (stored["medium"], stored["lora_name"], stored["block_size"]) == ("GPU", "poet", 2)
    assert stored["extra_keys"] == [["poet", salt_digest("acme")], ["poet"]]
    assert "cache_salt" not in stored
    assert removed["type"] == "BlockRemoved"
    assert removed["block_hashes"] == [(b"b" * 32).hex()]
    assert "cause" not in removed
    assert cleared == {"type": "AllBlocksCleared"}


def test_without_our_fields_the_bytes_are_vllms(vllm_python: str) -> None:
    batch = KVEventBatch(
        1.5,
        [
            BlockStored([b"a", 2**64 - 1], b"p", [1, 70000], 1, medium="GPU"),
            BlockStored(
                [1], None, [1], 1, None, "GPU", "poet", [("poet",)], 0, "full_attention", None, "LOCAL"
            ),
            BlockRemoved([1], "GPU", 0),
            AllBlocksCleared(),
        ],
        3,
    )
    done = subprocess.run(
        [vllm_python, "-c", READ], input=encode_batch(batch).hex(), capture_output=True, text=True, check=True
    )
    assert marked(done.stdout, "BYTES") == encode_batch(batch).hex()


def test_we_read_vllms_publisher_and_its_replay(
    vllm_python: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    replay = tmp_path_factory.mktemp("r") / "r"
    speaker = subprocess.Popen(
        [vllm_python, "-c", SPEAK, str(replay)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert speaker.stdout
    try:
        endpoint = next(line for line in speaker.stdout if line.startswith("ENDPOINT"))
        where = endpoint.removeprefix("ENDPOINT").strip()
        with KVEventSubscriber(where, f"ipc://{replay}", "kv", replay_timeout_s=60) as subscriber:
            for number in range(3):
                item = subscriber.poll(60)
                assert isinstance(item, ReceivedBatch)
                assert (item.seq, item.batch.data_parallel_rank) == (number, 0)
                assert item.batch.events == [
                    BlockStored([bytes([number]) * 32], None, [number, 7], 2, medium="GPU", group_idx=0),
                    BlockRemoved([number], "GPU"),
                    AllBlocksCleared(),
                ]
    finally:
        speaker.communicate("")
