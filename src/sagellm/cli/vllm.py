"""`sagellm vllm serve`: a vLLM server with our KV cache policy."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sagellm.cli import AUTOLOAD, NO_AUTOLOAD
from sagellm.cli._options import App, Command, OptionGroup, argument, command, flag
from sagellm.core.errors import ConfigError, MissingExtraError

app = App(help="Our KV cache policies inside vLLM.")
MULTI = "MultiConnector"
FAILURES, RECOMPUTE = "kv_load_failure_policy", "recompute"
"""What vLLM does with a request whose blocks were not loaded, and what it has to do with our store."""
CONFIG_FLAG, ADDITIONAL_FLAG = "--kv-transfer-config", "--additional-config"
SCHEDULER = "sagellm.engines.vllm.scheduler.SageScheduler"
_MODE_HELP = "shadow: only tell what the policy would reuse; on: it decides, until it loses to LRU."
_OPTION_HELP = "Set an option of the policy, such as max_records=1000; may be repeated."
_HINT_HELP = (
    "Heed this kind of hints of clients: session.end, session.supersede, kv.retain, kv.expect, pin, or all;"
    " may be repeated."
)


@dataclass(frozen=True, slots=True)
class SageOptions(OptionGroup):
    """What our connector gets; all else is vLLM's."""

    sage_mode: str = flag("MODE", _MODE_HELP, "shadow")
    sage_policy: str = flag("NAME", "The policy of eviction.", "adaptive")
    sage_option: tuple[str, ...] = flag("KEY=VALUE", _OPTION_HELP, ())
    sage_hint: tuple[str, ...] = flag("KIND", _HINT_HELP, ())
    sage_strategy: str | None = flag("NAME", "Order requests by this strategy too; none: vLLM's order.")
    sage_report_s: float = flag("SECONDS", "Between two lines in the log; 0: none.", 300.0)
    sage_host_gb: float = flag("GIB", "Keep KV in host memory too, at most so much.", 0.0)
    sage_disk_gb: float = flag("GIB", "Keep KV on a disk too, at most so much.", 0.0)
    sage_dir: str = flag("DIR", "Folder of the KV on disk.", "")

    def connector(self) -> dict[str, Any]:
        """The configuration of our connector. Raises `SageError` for what is not known."""
        from sagellm.engines.guests.settings import GuestSettings

        options = dict(map(_parsed, self.sage_option))
        settings = GuestSettings.of(
            {
                "mode": self.sage_mode,
                "policy": self.sage_policy,
                "options": options,
                "hints": "all" if "all" in self.sage_hint else list(self.sage_hint),
                "report_s": self.sage_report_s,
            }
        )
        return {
            "kv_connector": "SageConnector",
            "kv_connector_module_path": "sagellm.engines.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": asdict(settings),
        }

    def store(self) -> dict[str, Any] | None:
        """The configuration of our store, if it is wanted. Raises `SageError` for wrong sizes."""
        from sagellm.engines.guests.settings import StoreSettings

        if not self.sage_host_gb and not self.sage_disk_gb and not self.sage_dir:
            return None
        sizes = {"host_gb": self.sage_host_gb, "disk_gb": self.sage_disk_gb, "dir": self.sage_dir}
        return {
            "kv_connector": "SageStoreConnector",
            "kv_connector_module_path": "sagellm.engines.vllm.store",
            "kv_role": "kv_both",
            FAILURES: RECOMPUTE,
            "kv_connector_extra_config": asdict(StoreSettings.of(sizes)),
        }

    def check_folder(self) -> None:
        """Raise `ConfigError` where vLLM's workers could make no folder for KV. They ask after loading."""
        from sagellm.core.config import KVConfig
        from sagellm.kvmgr.kv_pool.tiers.disk_folder import check_kv_folder

        store = self.store()
        if store is not None and (folder := store["kv_connector_extra_config"]["dir"]):
            check_kv_folder(KVConfig(disk_gb=self.sage_disk_gb, dir=str(Path(folder) / "vllm")))

    def scheduler(self) -> dict[str, Any] | None:
        """The configuration of our scheduler, if it is wanted."""
        from sagellm.engines.guests.settings import SchedulingSettings

        if self.sage_strategy is None:
            return None
        return asdict(SchedulingSettings.of({"strategy": self.sage_strategy}))


def _parsed(text: str) -> tuple[str, Any]:
    key, found, value = text.partition("=")
    if not found:
        raise ConfigError(f"--sage-option {text}: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def taken(arguments: list[str], wanted: str) -> tuple[list[str], dict[str, Any] | None]:
    """The other arguments, and the JSON object of a flag of vLLM.

    Raises `ConfigError` where it is no JSON object.
    """
    rest, given = [], None
    words = iter(arguments)
    for word in words:
        name, found, value = word.partition("=")
        if name.replace("_", "-") != wanted:
            rest.append(word)
            continue
        given = value if found else next(words, "")
    if given is None:
        return rest, None
    try:
        made = json.loads(given)
    except ValueError as error:
        raise ConfigError(f"{wanted} {given!r} is no JSON: {error}") from error
    if not isinstance(made, dict):
        raise ConfigError(f"{wanted} {given!r}: write a JSON object")
    return rest, made


def beside(other: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """A `MultiConnector` with both; another `MultiConnector` gets one member more.

    What vLLM reads of the outer configuration (role, policy for failed loads, ...) is the other one's. vLLM
    gives its `engine_id` to each member itself, and refuses a member with one of its own.
    """
    if other.get("kv_connector") == MULTI:
        extra = other.get("kv_connector_extra_config", {})
        return {
            **other,
            "kv_connector_extra_config": {**extra, "connectors": [*extra.get("connectors", ()), ours]},
        }
    of_one = ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")
    member = {name: value for name, value in other.items() if name != "engine_id"}
    return {
        "kv_role": "kv_both",
        **{name: value for name, value in other.items() if name not in of_one},
        "kv_connector": MULTI,
        "kv_connector_extra_config": {"connectors": [member, ours]},
    }


def combined(arguments: list[str], sage: SageOptions) -> list[str]:
    """The arguments of vLLM with our connector and scheduler.

    Beside another connector ours runs in a `MultiConnector`.
    """
    arguments, other = taken(arguments, CONFIG_FLAG)
    ours, store, scheduler = sage.connector(), sage.store(), sage.scheduler()
    if other is not None:
        ours = beside(other, ours)
    if store is not None:
        if ours.get(FAILURES, RECOMPUTE) != RECOMPUTE:
            raise ConfigError(
                f"{CONFIG_FLAG}: with a store {FAILURES} must be {RECOMPUTE}, got {ours[FAILURES]!r}"
            )
        ours = {**beside(ours, store), FAILURES: RECOMPUTE}
    words = [CONFIG_FLAG, json.dumps(ours)]
    if scheduler is not None:
        arguments, additional = taken(arguments, ADDITIONAL_FLAG)
        added = json.dumps({**(additional or {}), "sagellm": scheduler})
        words = ["--scheduler-cls", SCHEDULER, ADDITIONAL_FLAG, added, *words]
    return [*arguments, *words]


@command
def serve(
    model: str = argument("MODEL", "Folder or hub name of the model.", ...),
    arguments: list[str] = argument("[FLAG]...", "Flags of vllm serve, passed on.", (), show_default=False),
    *,
    show_command: bool = flag("--show-command", "Print the command and run nothing.", False),
    sage: SageOptions,
) -> None:
    """Serve a model with vLLM, with our eviction policy and our store of KV.

    By default the policy only watches.

    Everything but the options below goes to vllm serve as it is.
    """
    words = combined(list(arguments), sage)
    if show_command:
        print(shlex.join(["vllm", "serve", model, *words]))
        return
    sage.check_folder()
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("vllm serve", "vllm", "vllm")
    sys.stdout.flush()
    if os.environ.get(AUTOLOAD) == NO_AUTOLOAD:  # what vLLM loads is its own affair
        del os.environ[AUTOLOAD]
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *words])


app.command("serve", cls=Command, context_settings={"ignore_unknown_options": True})(serve)
