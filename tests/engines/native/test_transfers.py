"""Two engines: one computes a prompt, the other gets its KV and continues with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_transfer import TransferStatus
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.build_transfers import build_transfers
from sagellm.engines.transfers import KVTransfers
from tests.comm.kv_transfer.fabrics import NAMES, transport
from tests.engines.native.tiered import WHOLE, ask, engine, kv_of, prompts
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama")
    return folder


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def pair(
    folder: Path, kind: str, stack: ExitStack, decode: Mapping[str, Any] = {}, **settings: Any
) -> tuple[KVTransfers, KVTransfers]:
    """A prefill and a decode instance that know each other."""
    network, made = InProcessNetwork(), []
    for node, own in (("prefill", {}), ("decode", decode)):
        asked = engine(folder, **settings, **own)
        stack.callback(asked.close)
        made.append(build_transfers(asked, node, transport(kind, node, network)))
        stack.callback(made[-1].close)
    source, target = made
    source.channel.add_peer(target.channel.metadata())
    target.channel.add_peer(source.channel.metadata())
    return source, target


def move(source: KVTransfers, target: KVTransfers, prompt: list[int], note: bytes = b"") -> int:
    """Send the KV of a prompt; returns the tokens that arrived."""
    source.send("r", Tokens(prompt), "decode", note=note)
    received: list[Any] = []
    for _ in range(5000):
        source.poll()
        received += target.poll()
        if source.reports and received:
            break
        target.channel.wait(0.002)
    [report], [one] = source.reports, received
    source.reports.clear()
    assert report.num_tokens == one.num_tokens
    assert one.note == note
    for each in (source, target):
        each.engine.check()
        each.channel.check()
    return int(one.num_tokens)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", NAMES)
def test_decode_continues_with_the_same_tokens(
    kind: str, overlap: bool, model: Path, stack: ExitStack
) -> None:
    source, target = pair(model, kind, stack, {}, **{"engine.overlap": overlap})
    for number, prompt in enumerate(prompts(count=2)):
        alone, _ = ask(source.engine, f"p{number}", prompt)
        assert move(source, target, prompt, b"first token") == WHOLE
        assert torch.equal(kv_of(source.engine, prompt), kv_of(target.engine, prompt))
        tokens, num_cached = ask(target.engine, f"d{number}", prompt)
        assert (tokens, num_cached) == (alone, WHOLE)


def test_a_target_that_runs_requests_evicts_for_what_comes(model: Path, stack: ExitStack) -> None:
    """20 blocks at the target, 15 for each prompt."""
    source, target = pair(model, "in_process", stack)
    for number, prompt in enumerate(prompts(count=4)):
        ask(target.engine, f"o{number}", prompts(seed=9, count=4)[number])
        alone, _ = ask(source.engine, f"p{number}", prompt)
        assert move(source, target, prompt) == WHOLE
        assert ask(target.engine, f"d{number}", prompt) == (alone, WHOLE)


def test_nothing_is_compacted_while_blocks_are_sent(model: Path, stack: ExitStack) -> None:
    source, _ = pair(model, "in_process", stack)
    [prompt] = prompts(count=1)
    ask(source.engine, "a", prompt)
    source.send("r", Tokens(prompt), "decode")
    assert source.engine.compact() == 0
    assert source.engine.kv.pins.num_sent == 1
    source.close()
    assert source.engine.kv.pins.num_sent == 0
    assert [report.status for report in source.reports] == [TransferStatus.CANCELLED]
    assert not source.poll()
    source.close()
    source.engine.check()


def test_other_block_sizes_are_refused(model: Path, stack: ExitStack) -> None:
    source, target = pair(model, "in_process", stack, decode={"kv.block_size": 8})
    [prompt] = prompts(count=1)
    ask(source.engine, "a", prompt)
    source.send("r", Tokens(prompt), "decode")
    for _ in range(2000):
        source.poll()
        target.poll()
        if source.reports:
            break
        source.channel.wait(0.002)
    [report] = source.reports
    assert report.status is TransferStatus.REFUSED
    assert "block_size: 4 at the sender, 8 at the receiver; set kv.block_size" in report.reason


def test_another_tenant_does_not_find_it(model: Path, stack: ExitStack) -> None:
    source, target = pair(model, "in_process", stack)
    [prompt] = prompts(count=1)
    ask(source.engine, "a", prompt)
    assert move(source, target, prompt) == WHOLE
    index = target.engine.kv.index
    assert index.lookup(Tokens(prompt), Namespace("other")).num_tokens == 0


def test_an_engine_without_a_cache_sends_nothing(model: Path) -> None:
    asked = engine(model, **{"kv.prefix_caching": False})
    with pytest.raises(ConfigError, match=r"needs kv\.prefix_caching"):
        build_transfers(asked, "a", transport("in_process", "a", InProcessNetwork()))
