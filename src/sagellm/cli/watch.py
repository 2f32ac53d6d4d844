"""`sagellm watch`: what running KV caches hit, and what they could hit."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sagellm.benchmarks.reporting import check_writable, print_tables, write_json
from sagellm.cli._options import OptionGroup, argument, command, flag
from sagellm.cli.cache_server import DEFAULT_URL
from sagellm.core.clock import MonotonicClock
from sagellm.core.config_layers import env_name
from sagellm.core.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from sagellm.core.types import Tokens
    from sagellm.diagnostics.watch.endpoints import ServerAddress
    from sagellm.diagnostics.watch.replays import OnReplay, WatchReplay
    from sagellm.diagnostics.watch.report import WatchReport
    from sagellm.diagnostics.watch.watcher import CacheSizes, Watcher

_SERVER_HELP = (
    "A server: tcp://host:port of its KV events, and behind commas the tcp:// address of its replay socket "
    "and http://host:port, whose metrics are read. Several make a fleet."
)
_PROXY_HELP = "Listen as well, and pass requests on to this server, which then reports all hits."
_BYTES_HELP = "Bytes of KV per token, where neither the metrics nor --model tell."
DTYPE_BYTES = {"float32": 4, "float": 4}
DEFAULT_DTYPE_BYTES = 2
INTERVAL_S, FLEET_INTERVAL_S = 5.0, 1.0
TOGETHER_S = 1.0
"""Signals within this time are one."""
LINE_S, SILENT_S = 60.0, 10.0
JOBS = min(8, os.cpu_count() or 1)
"""Processes for replays. Each holds all requests."""


@dataclass(frozen=True, slots=True)
class Servers(OptionGroup):
    """What is known of the servers beside their metrics."""

    blocks: int | None = flag("N", "KV blocks of each server, where the metrics do not tell.")
    bytes_per_token: int | None = flag("N", _BYTES_HELP)
    model: Path | None = flag("FOLDER", "The model's folder: KV bytes from config.json, and --text.")

    def sizes(self) -> CacheSizes:
        """The sizes that are known. Raises `ConfigError` for a folder without a readable config.json."""
        from sagellm.diagnostics.watch.watcher import CacheSizes

        if self.blocks is not None and self.blocks < 1:
            raise ConfigError(f"--blocks {self.blocks}: at least one")
        if self.bytes_per_token is not None and self.bytes_per_token < 1:
            raise ConfigError(f"--bytes-per-token {self.bytes_per_token}: at least one")
        bytes_per_token = self.bytes_per_token
        if bytes_per_token is None and self.model is not None:
            bytes_per_token = kv_bytes_per_token(self.model / "config.json")
        return CacheSizes(self.blocks, bytes_per_token)


@dataclass(frozen=True, slots=True)
class FleetOptions(OptionGroup):
    """A fleet that is shown by its instances."""

    url: str | None = flag("--url URL", "Show the instances of the fleet at this address.")
    instance: str | None = flag("NAME", "Also show this one in detail; needs an admin key.")
    admin_key: str | None = flag("KEY", "The fleet's; default: SAGELLM_SERVER_ADMIN_KEY.")
    api_key: str | None = flag("KEY", "Where clients need one; default: SAGELLM_SERVER_API_KEY.")


_KV_BY_LAYER = ("per_layer_config", "global_head_dim", "num_kv_shared_layers")
"""Keys of Gemma 4's configurations, whose layers differ in their KV."""


def kv_bytes_per_token(config: Path) -> int:
    """Bytes of keys and values of one token, by a Hugging Face configuration."""
    try:
        model = json.loads(config.read_text(encoding="utf-8"))
        model = model.get("text_config", model)
        dtype = model.get("dtype") or model.get("torch_dtype") or ""
        size = DTYPE_BYTES.get(dtype, DEFAULT_DTYPE_BYTES)
        if "kv_lora_rank" in model:  # latent attention: one vector
            width = model["kv_lora_rank"] + model["qk_rope_head_dim"]
            return int(model["num_hidden_layers"] * width * size)
        own = [key for key in _KV_BY_LAYER if model.get(key)]
        if own:
            raise ValueError(f"layers differ by {', '.join(own)}; sagellm doctor -m prints the bytes")
        heads = model["num_attention_heads"]
        head_dim = model.get("head_dim") or model["hidden_size"] // heads
        kv_heads = model.get("num_key_value_heads") or heads
        return int(2 * model["num_hidden_layers"] * kv_heads * head_dim * size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{config} does not say how large a token's KV is ({error}): give --bytes-per-token"
        ) from error


@command
def watch(
    servers: list[str] = argument("[SERVER]...", _SERVER_HELP, (), show_default=False),
    duration: float = flag("SECONDS", "How long; Ctrl-C ends it sooner.", 600.0),
    interval: float | None = flag("SECONDS", "Between two looks; default: 5, at a fleet 1."),
    proxy: str | None = flag("URL", _PROXY_HELP),
    listen: str = flag("HOST:PORT", "Where the proxy listens; port 0: any.", "127.0.0.1:0"),
    out_file: Path = flag("--html FILE", "Write the page there.", Path("watch.html")),
    json_file: Path | None = flag("--json FILE", "Write the figures there."),
    record: Path | None = flag("FILE", "Write whole requests there, as a trace without text."),
    max_blocks: int = flag("N", "Different blocks to remember, 0.6 kB each.", 1_000_000),
    *,
    text: bool = flag(
        "--text", "Show the text of evicted prefixes; needs --model and the extra native.", False
    ),
    known: Servers,
    fleet: FleetOptions,
) -> None:
    """Watch the KV cache of running servers, and what would raise its hit rate.

    Or the instances of a fleet, with --url. Nothing is changed at the server, and nothing is sent anywhere.
    """
    if not duration > 0 or (interval is not None and not interval > 0):
        raise ConfigError("--duration and --interval must be more than 0 seconds")
    if fleet.url is not None or fleet.instance is not None:
        _watch_fleet(fleet, duration, interval, json_file, [*servers, proxy, record, text])
        return
    from sagellm.control_plane.kv_events.publisher import WallClock
    from sagellm.diagnostics.watch.proxy import ReportingProxy
    from sagellm.diagnostics.watch.recording import WatchRecording
    from sagellm.diagnostics.watch.watcher import Watcher

    for path in filter(None, (out_file, json_file, record)):
        check_writable(path)
    decode = _decoder(known.model) if text else None
    addresses = _addresses(servers, proxy)
    host, port = _host_and_port(listen)
    with ExitStack() as stack:
        recording = stack.enter_context(WatchRecording(record)) if record is not None else None
        watcher = Watcher(
            addresses,
            sizes=known.sizes(),
            max_blocks=max_blocks,
            on_access=recording.write if recording is not None else None,
            wall_clock=WallClock(),
        )
        stop = stack.enter_context(_stopped_by_signals())
        try:
            if proxy is not None:
                url = stack.enter_context(ReportingProxy(proxy, host, port)).url
                print(f"sagellm: send requests to {url}, which passes them on to {proxy}", file=sys.stderr)
            _follow(watcher, duration, interval or INTERVAL_S, stop.is_stopped)
        finally:
            watcher.close()
        stop.is_stopped.set()  # the next signal ends the replays
        with _replay_view() as show:
            report = watcher.report(jobs=JOBS, decode=decode, on_replay=show)
    _write(report, out_file, json_file)
    if recording is not None:
        print(recording.summary())


def _write(report: WatchReport, out_file: Path, json_file: Path | None) -> None:
    from sagellm.diagnostics.watch.page import render

    out_file.write_text(render(report), encoding="utf-8")
    if json_file is not None:
        write_json(json_file, as_json(report))
    _show(report)
    print(f"\n{out_file}")


def _watch_fleet(
    options: FleetOptions,
    seconds: float,
    interval: float | None,
    json_file: Path | None,
    others: Sequence[object],
) -> None:
    """Show a fleet. `others`: options that go with KV events alone."""
    from sagellm.cli.watch_fleet import FleetWatch, watch_fleet

    if any(others):
        raise ConfigError("--url shows a fleet: SERVER, --proxy, --record and --text are for KV events")
    if json_file is not None:
        check_writable(json_file)
    api_key = options.api_key or os.environ.get(env_name("server.api_key"))
    watch = FleetWatch(options.url or DEFAULT_URL, options.admin_key, api_key, options.instance)
    with _stopped_by_signals() as stop:
        watch_fleet(watch, interval or FLEET_INTERVAL_S, seconds, stop.is_stopped, json_file)


def _addresses(servers: Sequence[str], proxy: str | None) -> list[ServerAddress]:
    """The servers to watch. The one behind the proxy need not be named again."""
    from sagellm.diagnostics.watch.counters import metrics_url
    from sagellm.diagnostics.watch.endpoints import ServerAddress

    if proxy is None and not servers:
        raise ConfigError("name a server, as tcp://host:5557,http://host:8000, or http://host:8000 alone")
    addresses = [ServerAddress.parse(server) for server in servers]
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(f"{address.name} is named twice: a fleet has each server once")
    if proxy is None or len(addresses) > 1:
        return addresses
    metrics = metrics_url(proxy)
    [only] = addresses or [ServerAddress()]
    return [dataclasses.replace(only, metrics=only.metrics or metrics)]


def _show(report: WatchReport) -> None:
    from sagellm.diagnostics.watch.terminal import tables

    print_tables(tables(report))
    for line in (*report.unknown, *(each.text for each in report.advice)):
        print(f"\n{line}")


def as_json(report: WatchReport) -> dict[str, Any]:
    """The report as JSON has it: enums by their text, infinity as null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if value == float("inf"):
            return None
        return getattr(value, "value", value)

    return {name: plain(value) for name, value in dataclasses.asdict(report).items()}


def _follow(watcher: Watcher, duration: float, interval: float, ended: threading.Event) -> None:
    """Show what is known until the time is up or the event is set.

    Without a terminal: a line every `LINE_S`, and what is missing once `SILENT_S` have passed."""
    from sagellm.diagnostics.watch.terminal import line, tables

    terminal = Console(stderr=True)
    next_line_s, said = LINE_S, set[str]()
    with Live(console=terminal, transient=True, auto_refresh=False) as live:
        while not ended.wait(max(0.0, min(interval, duration - watcher.seconds, threading.TIMEOUT_MAX))):
            if watcher.seconds >= duration:
                return
            watcher.update()
            report = watcher.report(with_replays=False)
            if terminal.is_terminal:
                live.update(Group(*tables(report), *map(Text, report.unknown)), refresh=True)
                continue
            if watcher.seconds >= next_line_s:
                next_line_s += LINE_S
                _log(line(report))
            for text in report.unknown if watcher.seconds >= SILENT_S else ():
                if text not in said:
                    said.add(text)
                    _log(text)


def _log(text: str) -> None:
    print(f"sagellm: {text}", file=sys.stderr, flush=True)


@contextmanager
def _replay_view() -> Iterator[OnReplay]:
    """Show which replays are done.

    In one line of a terminal, else in a line now and then."""
    terminal, clock = Console(stderr=True), MonotonicClock()
    next_line_s = clock.now() + SILENT_S
    with terminal.status("replaying requests; Ctrl-C writes the page without the rest") as status:

        def show(case: WatchReplay, num_done: int, num_all: int) -> None:
            nonlocal next_line_s
            text = f"replays: {num_done} of {num_all} done, the last one `{case.policy}`"
            text += f" with {case.num_blocks:,} blocks; Ctrl-C writes the page without the rest"
            if terminal.is_terminal:
                status.update(text)
            elif clock.now() >= next_line_s:
                next_line_s = clock.now() + LINE_S
                _log(text)

        yield show


class _Stop:
    """Handles Ctrl-C and SIGTERM.

    The first one sets the event, the next one raises `KeyboardInterrupt`."""

    def __init__(self) -> None:
        self.is_stopped = threading.Event()
        self._clock = MonotonicClock()
        self._last_s = -math.inf

    def __call__(self, number: int, frame: object) -> None:
        former_s, self._last_s = self._last_s, self._clock.now()
        if self._last_s - former_s < TOGETHER_S:
            return  # a shell and its program may both pass on one signal
        if self.is_stopped.is_set():
            raise KeyboardInterrupt
        self.is_stopped.set()


@contextmanager
def _stopped_by_signals() -> Iterator[_Stop]:
    """Gives Ctrl-C and SIGTERM to a `_Stop` for a while."""
    stop = _Stop()
    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"--listen {text!r}: write HOST:PORT, as 127.0.0.1:0")
    return host.strip("[]"), int(port)


def _decoder(folder: Path | None) -> Callable[[Tokens], str]:
    if folder is None:
        raise ConfigError("--text needs --model FOLDER, whose tokenizer makes text of tokens")
    try:
        from sagellm.engines.native.tokenizer import Tokenizer
    except ImportError as error:
        raise MissingExtraError("a model's tokenizer", "native") from error
    tokenizer = Tokenizer.from_folder(folder)
    return lambda tokens: tokenizer.decode(tokens.tolist())
