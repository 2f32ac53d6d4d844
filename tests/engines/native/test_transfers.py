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
from sagellm.engines.build_kv import block_layout
from sagellm.engines.build_transfers import build_transfers
from sagellm.engines.transfers import KVTransfers
from sagellm.kvmgr.kv_pool.tiers.codecs import CODECS
from tests.comm.kv_transfer.fabrics import NAMES, transport
from tests.engines.native.tiered import WHOLE, ask, computed_in, engine, kv_of, prompts
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
    folder: Path, kind: str, stack: ExitStack, decode: Mapping[str, Any] = {}, codec: str = "raw",
    **settings: Any,
) -> tuple[KVTransfers, KVTransfers]:  # fmt: skip
    """A prefill and a decode instance that know each other."""
    network, made = InProcessNetwork(), []
    for node, own in (("prefill", {}), ("decode", decode)):
        asked = engine(folder, **settings, **own)
        stack.callback(asked.close)
        made.append(build_transfers(asked, node, transport(kind, node, network), codec=codec))
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
    settings: dict[str, Any] = {"engine.overlap": overlap}
    source, target = pair(model, kind, stack, **settings)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", CODECS.names())
def test_codecs_between_engines(codec: str, dtype: str, model: Path, stack: ExitStack) -> None:
    """What arrives is what the codec promises, and the target decodes from it."""
    source, target = pair(model, "in_process", stack, {}, codec, **computed_in(dtype))
    [prompt] = prompts(count=1)
    ask(source.engine, "p", prompt)
    assert move(source, target, prompt) == WHOLE
    before, after = (kv_of(each.engine, prompt).float() for each in (source, target))
    made = CODECS.create(codec, dtype=dtype, layout=block_layout(source.engine.backend))
    errors = (after - before).abs()
    assert (errors <= made.max_error * before.abs().amax(dim=1, keepdim=True)).all()
    assert bool(errors.any()) is not made.is_exact
    drawn, num_cached = ask(target.engine, "d", prompt)
    assert num_cached == WHOLE
    assert len(drawn) == 6
    if made.is_exact:
        assert drawn == ask(source.engine, "on the device", prompt)[0]


def test_a_codec_that_needs_a_layout_is_refused_where_there_is_none(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deepseek2-lite")
    asked = engine(tmp_path)
    with pytest.raises(ConfigError, match=r"latent attention.*use zstd or int8"):
        build_transfers(asked, "a", transport("in_process", "a", InProcessNetwork()), codec="delta")
    asked.close()
