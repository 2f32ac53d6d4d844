"""Tiers behind the native engine: a prompt that was evicted comes back, and its tokens are the same."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sagellm.core.blocks import Tier
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.native_code import cache_folder
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build_kv import block_layout
from sagellm.engines.engine import Engine
from sagellm.kvmgr.kv_pool.tiers.codecs.delta import DeltaCodec
from sagellm.kvmgr.kv_pool.tiers.codecs.int8 import GROUP, Int8Codec
from sagellm.kvmgr.kv_pool.tiers.disk import DiskStorage
from sagellm.kvmgr.kv_pool.tiers.disk_slab import SLAB_FILE
from tests.builders import split_loads
from tests.engines.native.tiered import (
    BLOCK,
    WHOLE,
    ask,
    computed_in,
    engine,
    hierarchy,
    kv_of,
    prompts,
)
from tests.kvmgr.tiers.storages.stored_blocks import FaultyIO
from tests.tiny_models import save_tiny

KINDS = ["llama", "mixtral", "deepseek2-lite", "gemma3", "gemma4"]
"""With KV heads, with latent KV, with layers of several windows, and with layers of several key sizes."""


@pytest.fixture(params=[("host_gb", None), ("disk_gb", None)], ids=["host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    name, _ = request.param
    return {f"kv.{name}": 0.05, **({"kv.dir": str(tmp_path / "kv")} if name == "disk_gb" else {})}


def int8_bound(kv: torch.Tensor) -> torch.Tensor:
    """Of each number, its largest error in the codec int8."""
    num_numbers = kv.shape[1]
    padded = torch.nn.functional.pad(kv.float().abs(), (0, -num_numbers % GROUP))
    largest = padded.view(len(kv), -1, GROUP).amax(dim=2)
    return Int8Codec.max_error * largest.repeat_interleave(GROUP, dim=1)[:, :num_numbers]


def delta_bound(kv: torch.Tensor, asked: Engine) -> torch.Tensor:
    """Of each number, its largest error in the codec delta."""
    layout = block_layout(asked.backend)
    assert layout is not None
    heads = kv.float().abs().view(-1, *layout.shape)
    return DeltaCodec.max_error * heads.amax(dim=(3, 5), keepdim=True).expand_as(heads).reshape(kv.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_the_same_tokens_after_eviction(
    tmp_path: Path, kind: str, overlap: bool, tier: dict[str, Any]
) -> None:
    save_tiny(tmp_path / "model", kind)
    alone = engine(tmp_path / "model")
    expected = [ask(alone, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts())]
    alone.close()
    tiered = engine(tmp_path / "model", **tier, **{"engine.overlap": overlap})
    for round_ in range(3):
        for i, prompt in enumerate(prompts()):
            drawn, num_cached = ask(tiered, f"{round_}-{i}", prompt)
            assert drawn == expected[i]
            assert num_cached == (0 if not round_ else WHOLE)
    [state] = hierarchy(tiered).states()
    assert state.loaded > 60
    assert not state.misses
    tiered.close()


@pytest.mark.parametrize("kind", ["llama", "deepseek2-lite"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_same_tokens_in_half_precision(
    tmp_path: Path, kind: str, dtype: str, tier: dict[str, Any]
) -> None:
    """The reference is a hit on the device: a prompt computed in one piece may round otherwise."""
    save_tiny(tmp_path / "model", kind)
    tiered = engine(tmp_path / "model", **tier, **computed_in(dtype))
    assert tiered.backend.get_kv_schema().dtype == dtype
    expected = []
    for i, prompt in enumerate(prompts()):
        ask(tiered, f"computed {i}", prompt)
        expected.append(ask(tiered, f"on the device {i}", prompt))
    [state] = hierarchy(tiered).states()
    assert not state.loaded
    for i, prompt in enumerate(prompts()):
        assert ask(tiered, f"in the tier {i}", prompt) == expected[i]
        assert expected[i][1] == WHOLE
    [state] = hierarchy(tiered).states()
    assert state.loaded == 4 * WHOLE // BLOCK
    assert not state.misses
    tiered.close()


@pytest.mark.parametrize("kind", ["llama", "deepseek2-lite"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_the_same_tokens_where_the_head_is_computed_and_the_tail_loaded(
    tmp_path: Path, kind: str, overlap: bool, tier: dict[str, Any]
) -> None:
    save_tiny(tmp_path / "model", kind)
    alone = engine(tmp_path / "model")
    expected = [ask(alone, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts(count=2))]
    alone.close()
    room = {"kv.num_blocks": 40, "scheduler.max_batched_tokens": 16, "scheduler.max_num_seqs": 4}
    tiered = engine(tmp_path / "model", **tier, **room, **{"engine.overlap": overlap})
    assert [ask(tiered, f"0-{i}", prompt)[0] for i, prompt in enumerate(prompts(count=2))] == expected
    tiered.clear_cache()
    split_loads(tiered.kv)
    for i, prompt in enumerate(prompts(count=2)):
        drawn, num_cached = ask(tiered, f"1-{i}", prompt)
        assert drawn == expected[i]
        assert 0 < num_cached < WHOLE
    assert tiered._kv_waits is not None
    assert tiered._kv_waits.num_tails == 2
    tiered.close()


def test_a_restart_hits_and_other_weights_miss(tmp_path: Path) -> None:
    disk = {"kv.disk_gb": 0.05, "kv.dir": str(tmp_path / "kv")}
    save_tiny(tmp_path / "model", "llama")
    first = engine(tmp_path / "model", **disk)
    expected = [ask(first, f"r{i}", prompt) for i, prompt in enumerate(prompts())]
    first.close()
    again = engine(tmp_path / "model", **disk)
    for i, prompt in enumerate(prompts()):
        assert ask(again, f"r{i}", prompt) == (expected[i][0], WHOLE)
    again.close()
    save_tiny(tmp_path / "other", "llama", seed=1)
    other = engine(tmp_path / "other", **disk)
    assert [ask(other, f"r{i}", prompt)[1] for i, prompt in enumerate(prompts())] == [0] * 4
    other.close()


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("load_hot", [True, False])
def test_after_a_restart_the_first_request_does_not_wait_for_a_shared_prompt(
    tmp_path: Path, load_hot: bool, overlap: bool
) -> None:
    """What three prompts began with is on the device before it is asked for."""
    save_tiny(tmp_path / "model", "llama")
    shared, *others = prompts(count=5)
    asked = [shared[:41] + other[:12] for other in others]
    disk = {"kv.disk_gb": 0.05, "kv.dir": str(tmp_path / "kv"), "kv.load_hot": load_hot}
    first = engine(tmp_path / "model", **disk, **{"engine.overlap": overlap})
    for i, prompt in enumerate(asked[:3]):
        ask(first, f"r{i}", prompt)
    expected, _ = ask(first, "expected", asked[3])
    first.clear_cache(tiers=True)
    for i, prompt in enumerate(asked[:3]):
        ask(first, f"again {i}", prompt)
    first.close()
    again = engine(tmp_path / "model", **disk, **{"engine.overlap": overlap})
    assert again.kv.index.num_cached == 0
    while again.has_work():
        again.step()
        again.check()
    assert again.idle_s() is None
    assert again.kv.index.num_cached == (10 if load_hot else 0)
    assert ask(again, "new", asked[3]) == (expected, 40)
    assert again.diagnostics().num_kv_waits == (0 if load_hot else 1)
    assert hierarchy(again).states()[0].loaded == 10
    again.close()


@pytest.mark.parametrize("rounded", [True, False], ids=["rounded", "exact"])
@pytest.mark.parametrize("computed", ["bfloat16", "float32"])
def test_a_folder_of_another_dtype_starts_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rounded: bool, computed: str
) -> None:
    """Whether weights are rounded, KV is, or both. With neither it is the same engine, which hits."""
    save_tiny(tmp_path / "model", "llama")
    disk = {"kv.disk_gb": 0.05, "kv.dir": str(tmp_path / "kv")}
    settings = computed_in(computed) | {"model.dtype": "bfloat16" if rounded else "float32"}
    is_same = computed == "float32" and not rounded
    first = engine(tmp_path / "model", **disk, **computed_in("float32"))
    for i, prompt in enumerate(prompts()):
        ask(first, f"r{i}", prompt)
    first.close()
    other = engine(tmp_path / "model", **disk, **settings)
    assert ("starts empty" in caplog.text) is not is_same
    drawn = [ask(other, f"r{i}", prompt) for i, prompt in enumerate(prompts())]
    assert [num_cached for _, num_cached in drawn] == [WHOLE if is_same else 0] * 4
    [state] = hierarchy(other).states()
    assert (state.loaded > 0, dict(state.misses)) == (is_same, {})
    for i, prompt in enumerate(prompts()):
        other.clear_cache(tiers=True)
        assert ask(other, f"computed {i}", prompt) == (drawn[i][0], 0)
    other.close()


@pytest.mark.parametrize("kind", ["llama", "deepseek2-lite"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", ["zstd", "int8", "delta"])
def test_codecs_on_the_way_down(tmp_path: Path, codec: str, dtype: str, kind: str) -> None:
    """The KV that comes back is what was stored, or as near as the codec promises.

    KV has the dtype in which the model computes. There are no pools of 8-bit numbers in this engine.
    """
    disk = {"kv.disk_gb": 0.05, "kv.dir": str(tmp_path / "kv"), "kv.codec": codec}
    save_tiny(tmp_path / "model", kind)
    if (codec, kind) == ("delta", "deepseek2-lite"):
        with pytest.raises(ConfigError, match=r"latent attention.*use zstd or int8"):
            engine(tmp_path / "model", **disk, **computed_in(dtype))
        return
    tiered = engine(tmp_path / "model", **disk, **computed_in(dtype))
    stored, expected = [], []
    for i, prompt in enumerate(prompts()):
        ask(tiered, f"computed {i}", prompt)
        stored.append(kv_of(tiered, prompt))
        expected.append(ask(tiered, f"on the device {i}", prompt))
    for i, prompt in enumerate(prompts()):
        drawn, num_cached = ask(tiered, f"in the tier {i}", prompt)
        assert num_cached == WHOLE
        loaded = kv_of(tiered, prompt)
        if codec == "zstd":
            assert drawn == expected[i][0]
            assert torch.equal(loaded, stored[i])
        else:
            bound = int8_bound(stored[i]) if codec == "int8" else delta_bound(stored[i], tiered)
            assert ((loaded.float() - stored[i].float()).abs() <= bound).all()
            assert not torch.equal(loaded, stored[i])
    [state] = hierarchy(tiered).states()
    assert state.loaded == 4 * WHOLE // BLOCK
    assert not state.misses
    tiered.close()


def test_damaged_bytes_on_disk_are_computed_again(tmp_path: Path) -> None:
    disk = {"kv.disk_gb": 0.05, "kv.dir": str(tmp_path / "kv")}
    save_tiny(tmp_path / "model", "llama")
    first = engine(tmp_path / "model", **disk)
    expected = [ask(first, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts())]
    first.close()
    [slab] = [path for path in (tmp_path / "kv").iterdir() if path.stat().st_size > 1 << 20]
    data = bytearray(slab.read_bytes())
    for offset in range(1 << 13, 1 << 20, 1 << 13):
        data[offset] ^= 1
    slab.write_bytes(data)
    again = engine(tmp_path / "model", **disk)
    for i, prompt in enumerate(prompts()):
        assert ask(again, f"r{i}", prompt)[0] == expected[i]
    [state] = hierarchy(again).states()
    assert state.misses.keys() <= {"corrupt", "absent"}
    assert state.misses["corrupt"] > 0
    again.close()


def test_both_tiers_and_their_counts(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    disk = {"kv.disk_gb": 0.05, "kv.dir": str(tmp_path / "kv")}
    probe = engine(tmp_path / "model")
    block_gb = probe.backend.get_kv_schema().bytes_per_block / 2**30
    probe.close()
    tiered = engine(tmp_path / "model", **disk, **{"kv.host_gb": 24.5 * block_gb})
    for round_ in range(2):
        for i, prompt in enumerate(prompts(count=6)):
            ask(tiered, f"{round_}-{i}", prompt)
    host, nvme = tiered.diagnostics().tiers
    assert (host.tier, nvme.tier) == (Tier.DRAM, Tier.NVME)
    assert host.total == 24
    assert nvme.loaded > host.loaded
    assert host.evicted > 0
    assert tiered.stats().tier_faults == []
    tiered.close()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or not shutil.which("mount") or os.system(f"mount -t tmpfs -o size=3m tmpfs {folder}"):
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    os.system(f"umount -l {folder}")


def served_around(
    tmp_path: Path, kv: Path, caplog: pytest.LogCaptureFixture, num_prompts: int, io: FaultyIO | None = None
) -> str:
    """Ask until the disk has failed, and more: the same tokens as without tiers. Returns the one fault."""
    save_tiny(tmp_path / "model", "llama")
    alone = engine(tmp_path / "model")
    tiered = engine(tmp_path / "model", **{"kv.disk_gb": 0.05, "kv.dir": str(kv)})
    storage = hierarchy(tiered).tiers[0].storage
    assert isinstance(storage, DiskStorage)
    if io is not None:
        storage._slab._io = io
    asked = prompts(count=num_prompts)
    for i, prompt in enumerate([*asked, *asked[:4]]):
        assert ask(tiered, f"r{i}", prompt)[0] == ask(alone, f"r{i}", prompt)[0]
    [fault] = tiered.stats().tier_faults
    warnings = [each.getMessage() for each in caplog.records if "tier" in each.getMessage()]
    assert [each for each in warnings if "room for" not in each] == [f"the disk tier is off: {storage.fault}"]
    assert fault == f"nvme: {storage.fault}"
    tiered.close()
    alone.close()
    return fault


@pytest.mark.parametrize(("number", "error_number"), [(0, errno.EIO), (7, errno.ENOSPC)])
def test_a_disk_that_fails_is_said_once_and_served_around(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int, error_number: int
) -> None:
    """At its first call, or at a later one."""
    io = FaultyIO()
    io.arm(number, error_number)
    assert f"[Errno {error_number}]" in served_around(tmp_path, tmp_path / "kv", caplog, 12, io)


def test_a_full_disk_is_said_once_and_served_around(
    tmp_path: Path, full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert f"[Errno {errno.ENOSPC}]" in served_around(tmp_path, full_disk / "kv", caplog, 60)


def test_the_slab_is_no_larger_than_its_setting(tmp_path: Path) -> None:
    """A slot also has a header, and is rounded up to 4 KiB; these blocks are smaller."""
    save_tiny(tmp_path / "model", "llama")
    tiered = engine(tmp_path / "model", **{"kv.disk_gb": 0.001, "kv.dir": str(tmp_path / "kv")})
    assert 0.9 * 0.001 * 2**30 < (tmp_path / "kv" / SLAB_FILE).stat().st_size <= 0.001 * 2**30
    tiered.close()


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "model", "llama")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder().parent.parent))  # kernels are built once
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    engine(tmp_path / "model", **{"kv.disk_gb": 0.01, "kv.dir": "~/cache/kv"}).close()
    assert (tmp_path / "home" / "cache" / "kv" / SLAB_FILE).exists()
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("bad", ["a file", "below a file", "a symlink", "open to others"])
def test_a_bad_folder_is_refused_before_the_weights_load(tmp_path: Path, bad: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    name = {"a file": "file", "below a file": "file/kv", "a symlink": "link", "open to others": "open"}[bad]
    with pytest.raises(ConfigError, match=str(tmp_path / name)):
        engine(tmp_path / "no model", **{"kv.disk_gb": 0.01, "kv.dir": str(tmp_path / name)})


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("mistral-window", {"kv.host_gb": 1.0}, "sliding windows"),
        ("qwen3-next", {"kv.host_gb": 1.0}, "recurrent states"),
        ("llama", {"kv.host_gb": 1.0, "kv.prefix_caching": False}, "nothing to keep"),
        ("llama", {"kv.host_gb": 1e-9}, "hold no block"),
        ("llama", {"kv.disk_gb": 1.0}, "set kv.dir"),
        ("llama", {"kv.disk_gb": 1.0, "kv.dir": "kv", "kv.codec": "zip"}, "zstd"),
        ("llama", {"kv.dir": "kv"}, "give its size with kv.disk_gb"),
        ("llama", {"kv.disk_gb": 1.0, "kv.dir": "~nobody here/kv"}, "no such user"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any], reason: str
) -> None:
    save_tiny(tmp_path, kind)
    with pytest.raises((ConfigError, UnknownNameError), match=reason):
        engine(tmp_path, **settings)


WRITE_BACK = {"kv.write_policy": "write_back", "scheduler.max_batched_tokens": 8, "scheduler.max_num_seqs": 4}


def ask_slowly(asked: Engine, name: str, prompt: list[int]) -> tuple[list[int], int]:
    """As `ask`; copies end before the next step, as they do where a step takes longer than a copy."""
    asked.add(Request(name, Tokens(prompt), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
    drawn, num_cached = list[int](), 0
    while asked.has_work():
        for output in asked.step():
            drawn += output.new_token_ids
            num_cached = max(num_cached, output.num_cached_tokens or 0)
        assert asked._kv_waits is not None
        asked._kv_waits.settle()
        asked.check()
    return drawn, num_cached


@pytest.mark.parametrize("index", ["radix", "hashed"])
def test_write_back_saves_what_the_device_evicts(tmp_path: Path, index: str, tier: dict[str, Any]) -> None:
    save_tiny(tmp_path / "model", "llama")
    alone = engine(tmp_path / "model")
    expected = [ask(alone, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts())]
    alone.close()
    tiered = engine(tmp_path / "model", **tier, **WRITE_BACK, **{"kv.index": index})
    for round_ in range(3):
        for i, prompt in enumerate(prompts()):
            assert ask_slowly(tiered, f"{round_}-{i}", prompt) == (expected[i], WHOLE if round_ else 0)
    [state] = hierarchy(tiered).states()
    evicted = tiered.kv.allocator.num_evicted
    assert evicted.keys() == {"ahead"}, "nothing is evicted unsaved"
    assert state.loaded > 60
    assert state.stored < evicted["ahead"], "what a tier has is not written again"
    assert not state.misses
    assert not state.dropped
    tiered.close()


def test_write_back_writes_nothing_while_there_is_room(tmp_path: Path, tier: dict[str, Any]) -> None:
    save_tiny(tmp_path / "model", "llama")
    roomy = engine(tmp_path / "model", **tier, **WRITE_BACK, **{"kv.num_blocks": 200})
    for round_ in range(2):
        for i, prompt in enumerate(prompts()):
            assert ask_slowly(roomy, f"{round_}-{i}", prompt)[1] == (WHOLE if round_ else 0)
    assert hierarchy(roomy).states()[0].stored == 0
    roomy.close()


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_write_back_serves_right_tokens_however_slow_its_copies(
    tmp_path: Path, overlap: bool, tier: dict[str, Any]
) -> None:
    """Requests run at once, and blocks are evicted unsaved where copies do not keep up."""
    save_tiny(tmp_path / "model", "llama")
    alone = engine(tmp_path / "model")
    expected = [ask(alone, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts(count=6))]
    alone.close()
    settings = {**tier, **WRITE_BACK, "kv.num_blocks": 40, "engine.overlap": overlap}
    tiered = engine(tmp_path / "model", **settings)
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    for round_ in range(4):
        drawn: dict[str, list[int]] = {}
        for i, prompt in enumerate(prompts(count=6)):
            tiered.add(Request(f"{round_}-{i}", Tokens(prompt), greedy))
        while tiered.has_work():
            for output in tiered.step():
                drawn.setdefault(output.request_id, []).extend(output.new_token_ids)
            tiered.check()
        assert drawn == {f"{round_}-{i}": tokens for i, tokens in enumerate(expected)}
    assert hierarchy(tiered).states()[0].loaded
    tiered.close()
