"""`sagellm doctor`: what is installed, what is missing, and which models would fit."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sagellm import __version__
from sagellm.cli._loading import as_text
from sagellm.cli._options import Model, command
from sagellm.cli._settings import ServerSettings
from sagellm.cli.division import division_line
from sagellm.core.cores import usable_cores
from sagellm.core.errors import CapacityError, ConfigError, ModelError, SageError
from sagellm.core.extras import EXTRA_OF, install_command
from sagellm.core.types import AttentionChunk, width
from sagellm.engines.native import DEMO_MODEL

if TYPE_CHECKING:
    from sagellm.core.config import Config, KVConfig
    from sagellm.engines.native.footprint import Footprint

REQUIRED: Mapping[str, str] = {
    "numpy": "numpy",
    "pydantic": "pydantic",
    "PyYAML": "yaml",
    "torch": "torch",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "Jinja2": "jinja2",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "prometheus-client": "prometheus_client",
}
"""The packages that a server needs, with the module to import of each."""

OPTIONAL = ("huggingface_hub", "openai", "transformers")
COMPILERS = ("gcc", "g++", "clang", "cl", "nvcc", "ninja", "cmake")
MEMINFO = Path("/proc/meminfo")
EXIT_CANNOT_SERVE = 1
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?", re.ASCII)


@command
def doctor(*, model: Model, settings: ServerSettings) -> None:
    """Show what is installed, and whether a model fits and can be served.

    The exit status is 0 if it can be served or has to be fetched first, 1 if a package or the demo model
    is missing, 2 if MODEL cannot be served as configured.
    """
    print(f"sagellm {__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}")
    missing = _report_packages()
    whole = all((DEMO_MODEL / name).is_file() for name in ("config.json", "tokenizer.json"))
    whole = whole and any(DEMO_MODEL.glob("*.safetensors"))
    _line("demo model", "complete" if whole else f"missing in {DEMO_MODEL}")
    missing += [] if whole else ["the demo model"]
    found = devices(has_torch=not missing)
    print("\nmachine")
    for device in found:
        memory = f"{as_text(device.free_bytes)} of {as_text(device.total_bytes)} free"
        _line(device.name, f"{device.description}, {memory}")
    compilers = ", ".join(filter(shutil.which, COMPILERS))
    _line("compilers", compilers or "none (only optional kernels need one)")
    if missing:
        extras = {EXTRA_OF.get(REQUIRED.get(name, ""), "") for name in missing} - {""}
        print(f"\ncannot serve: missing {', '.join(missing)}; {install_command(','.join(sorted(extras)))}")
        raise typer.Exit(EXIT_CANNOT_SERVE)
    config = settings.load(model=model.name).config
    _report_port(config)
    named = config.model.device
    matching = [device for device in found if named in (device.name, device.name.partition(":")[0])]
    is_known = _report_fit(config, (matching or found)[0], found)  # the first one for auto
    print(
        "\nready to serve"
        if is_known
        else "\nready; whether the model can be served is known once it is here"
    )


def _report_packages() -> list[str]:
    """Print every package; returns the required ones that cannot be imported."""
    print("\npackages")
    missing = []
    for name, module in (*REQUIRED.items(), *((name, name) for name in OPTIONAL)):
        found = _version_of(name)
        state = found or f"missing: {install_command(EXTRA_OF.get(module, ''))}"
        fault = _import_fault(module) if found and name in REQUIRED else None
        if fault is not None:
            state = f"{found} cannot be imported ({fault}): pip install --force-reinstall {name}"
        if name in REQUIRED and (found is None or fault is not None):
            missing.append(name)
        _line(name, state if name in REQUIRED else f"{state}  (optional)")
    return missing


def _import_fault(module: str) -> str | None:
    """Why an installed package cannot be imported, in one line; None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a broken installation raises what it likes
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _line(name: str, state: str) -> None:
    print(f"  {name:<18} {state}")


def _report_port(config: Config) -> None:
    where = f"{config.server.host}:{config.server.port}"
    with socket.socket(socket.AF_INET6 if ":" in config.server.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.server.host, config.server.port))
            state = "free"
        except (OSError, ValueError, TypeError) as error:  # an odd host raises any of them
            reason = (isinstance(error, OSError) and error.strerror) or error
            state = f"not available ({reason}): choose another with --host and --port"
    _line("address", f"{where} {state}")


def _report_fit(config: Config, device: LocalDevice, found: Sequence[LocalDevice]) -> bool:
    """Print how the configured model fits. Raises `ModelError` if it cannot be served; returns whether it
    is on this machine.
    """
    from sagellm.engines.build import build_passes
    from sagellm.engines.build_kv import build_kv, check_tiers
    from sagellm.engines.build_speculation import check_method
    from sagellm.engines.native.from_config import model_footprint, num_pool_blocks, weight_bytes_of_ranks
    from sagellm.engines.native.hub import is_cached
    from sagellm.kvmgr.kv_pool.tiers.disk_folder import check_kv_folder

    print(f"\nwhat fits on {device.name}")
    name = config.model.name
    may_be_hub_name = name and _HUB_NAME.fullmatch(name) and not Path(name).exists()
    may_come = may_be_hub_name and not config.model.offline
    if name and may_come and not is_cached(name, config.model.revision):
        print(f"  {name}: no such folder, and not in the local cache; sagellm pull {name} fetches it")
        return False
    shown = name or "the demo model"
    located = {"name": name or str(DEMO_MODEL), "offline": True}
    config = config.model_copy(update={"model": config.model.model_copy(update=located)})
    try:
        size = model_footprint(config)
        _print_size(shown, size)
        if config.parallel.ffn:
            first, *others = weight_bytes_of_ranks(config)
            print(f"    rank 0, attention and all KV: weights of {as_text(first)}")
            for rank, num_bytes in enumerate(others, start=1):
                print(f"    rank {rank}, MLPs and experts: weights of {as_text(num_bytes)}")
        blocks = num_pool_blocks(config, size, device.name, device.free_bytes)
        build_kv(config.kv, blocks)  # for what they refuse: names and options of plug-ins
        check_kv_folder(config.kv)
        check_tiers(config.kv, is_windowed=size.is_windowed, has_states=size.state_bytes > 0)
        build_passes(config.scheduler)
        check_method(config.speculative.method)
    except SageError as error:
        print(f"    does not fit: {error}" if isinstance(error, CapacityError) else f"  {shown}: {error}")
        print()
        raise ModelError(f"cannot serve {shown}: {error}") from error
    share, context = config.kv.memory_share(device.name), size.max_model_len
    room = as_text(int((device.free_bytes - size.weight_bytes - size.draft_weight_bytes) * share))
    tokens = blocks * config.kv.block_size
    pool = f"{as_text(tokens * size.kv_bytes_per_token)} of {room} ({share:.0%} of what is free)"
    print(f"    {size.kv_bytes_per_token} bytes of KV per token: {tokens} tokens, {pool}")
    tiers = _tiers(config.kv, size.kv_bytes_per_token, tokens)
    for line in (*_kv_groups(size), *tiers, *_speculation(config, size)):
        print(f"    {line}")
    if size.state_bytes:
        print(f"    recurrent states: {as_text(size.state_bytes)} for each sequence that runs")
    if tokens < context:
        print(f"    room for one request of at most {tokens} of the {context} tokens that the model takes")
    else:
        print(f"    room for {tokens // context} requests of {context} tokens at once")
    free_bytes = {each.name: each.free_bytes for each in found if each.name != "cpu"}
    if len(free_bytes) > 1:
        from sagellm.comm.topology.manager import SystemTopology

        print(f"    {division_line(config, size, free_bytes, SystemTopology().detect())}")
    return True


def _speculation(config: Config, size: Footprint) -> Iterator[str]:
    """What speculative decoding takes where it depends on the model."""
    from sagellm.engines.native.from_config import draft_head_of

    if config.speculative.method == "auto":
        without = "none, since recurrent states do not go back" if size.state_bytes else "suffix"
        yield f"speculative.method auto: {without if draft_head_of(config) is None else 'heads'}"
    if size.draft_kv_bytes_per_token:
        copies = f"copies of weights: {as_text(size.draft_weight_bytes)}"
        yield (
            f"speculative.method self_draft: {size.draft_kv_bytes_per_token} bytes of KV per token beside "
            f"the model's, {copies if size.draft_weight_bytes else 'no copies of weights'}"
        )


def _tiers(config: KVConfig, bytes_per_token: int, pool_tokens: int) -> Iterator[str]:
    """The tokens that each tier holds, without a codec."""
    sizes = (
        ("host memory", config.host_gb),
        ("disk", config.disk_gb),
        ("shared store", config.remote_gb if config.remote_url else 0.0),
    )
    for name, gigabytes in sizes:
        if gigabytes:
            tokens = int(gigabytes * 2**30) // bytes_per_token
            hint = ", hardly more than the pool, whose KV it holds too" if tokens < 2 * pool_tokens else ""
            yield f"{name}: KV of {tokens} tokens in {gigabytes:g} GiB{hint}"


def _kv_groups(size: Footprint) -> Iterator[str]:
    """The KV groups of a model that has several, and what they save."""
    if not size.kv_groups:
        return
    counts = sorted({len(group.layers) for group in size.kv_groups})
    layers = " to ".join(map(str, [counts[0], counts[-1]][: len(counts)]))
    layers += " layer" if counts == [1] else " layers"
    whole = [group for group in size.kv_groups if group.window is None]
    each = size.kv_bytes_per_token // len(size.kv_groups)
    others = [group.window for group in size.kv_groups if group.window is not None]
    chunked = any(isinstance(window, AttentionChunk) for window in others)
    sizes = ", ".join(map(str, sorted(set(map(width, others)))))
    yield (
        f"{len(size.kv_groups)} KV groups of {layers}: {len(whole)} for all tokens, "
        f"{len(others)} for {'chunks' if chunked else 'windows'} of {sizes} tokens; a token behind these "
        f"keeps {each * len(whole)} bytes; "
        f"padding: {size.kv_padding_per_token} of {size.kv_bytes_per_token} bytes per token"
    )


def _print_size(name: str, size: Footprint) -> None:
    computed = "" if size.compute_dtype == size.dtype else f", computed in {size.compute_dtype}"
    form = size.dtype + computed
    if size.codes:
        form = f"{size.method} ({', '.join(map(str, size.codes))}), all else {form}"
    weights = f"{as_text(size.weight_bytes)} as {form}"
    print(f"  {name}: {size.num_parameters / 1e6:.1f} M parameters, {weights}")
    print(f"    runs {'through transformers, slower than a native model' if size.is_bridged else 'natively'}")
    if size.obstacle:
        print(f"    held dequantized, in part or whole: {size.obstacle}")


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """A device that a model can run on."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int


def devices(*, has_torch: bool) -> list[LocalDevice]:
    """Other vendors' chips, the GPUs, then the CPU."""
    found = []
    if has_torch:
        import torch

        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            free, total = torch.cuda.mem_get_info(index)
            description = f"{torch.cuda.get_device_name(index)}, CUDA {torch.version.cuda}"
            found.append(LocalDevice(f"cuda:{index}", description, total, free))
        found = [*_chips(), *found]
    return [*found, _cpu(has_torch=has_torch)]


def _chips() -> Iterator[LocalDevice]:
    """Other vendors' chips. Says what is missing where a chip is there and cannot be used."""
    from sagellm.comm.interconnect.lookup import interconnects

    for name, chip in interconnects():
        if not chip.is_available().has_device:
            continue
        try:
            info, count = chip.info, chip.device_count()
            for index in range(count if info.device_type != "cuda" else 0):
                memory = chip.memory_info(index)
                what = f"{info.vendor}, links {info.link}"
                yield LocalDevice(f"{info.device_type}:{index}", what, memory.total_bytes, memory.free_bytes)
        except ConfigError as error:
            _line(name, str(error))


def _cpu(*, has_torch: bool) -> LocalDevice:
    memory = read_meminfo(MEMINFO.read_text(encoding="ascii")) if MEMINFO.exists() else {}
    total = memory.get("MemTotal", _pages("SC_PHYS_PAGES"))
    free = memory.get("MemAvailable", _pages("SC_AVPHYS_PAGES"))
    if has_torch:
        import torch

        from sagellm.engines.native.memory import available_bytes

        # as the engine counts it: within the limits of control groups
        free = available_bytes(torch.device("cpu"))
    name = platform.processor() or platform.machine()
    return LocalDevice("cpu", f"{name}, {usable_cores()} cores", total, free)


def read_meminfo(text: str) -> Mapping[str, int]:
    """Bytes by name from the kernel's list of `Name:  number kB`."""
    rows = (line.partition(":") for line in text.splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in rows if value.strip().endswith("kB")}


def _pages(name: str) -> int:
    """Bytes by a name of `os.sysconf`; 0 where the system does not say."""
    if name not in getattr(os, "sysconf_names", {}):
        return 0
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
