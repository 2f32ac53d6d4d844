"""The configuration: every key with its default, range and meaning, and the presets.

Values come in layers (`core/config_layers.py`); models are frozen and refuse unknown keys. The name of a
plug-in (`kv.eviction`, `scheduler.passes`, ...) is looked up when the engine is built, not here.

To add a setting, write one line `name: type = key(default, meaning, limits)` in its section here: file,
environment (`SAGELLM_SECTION_NAME`), `--set` and `sagellm config show --origin` follow from it. Read it where
the engine is built (`engines/build.py`, `engines/native/from_config.py`) or served (`cli/serve.py`). A secret
goes into `SECRET_KEYS` (`config_layers.py`), an option of its own on the command line into `FLAGS`
(`cli/_settings.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from sagellm.core.fleet_config import FleetConfig
from sagellm.core.ports import SagePorts
from sagellm.core.sections import Fraction, Positive, Seconds, Section, Word, key
from sagellm.core.types import MAX_N

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""OpenAI's values of a request's `reasoning_effort`."""
ORIGIN = r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]+)$"
GPU_MEMORY_SHARE = 0.8
CPU_MEMORY_SHARE = 0.25


class ModelConfig(Section):
    """Which model, and how it is held."""

    name: str | None = key(None, "folder or hub name of the model; none: the demo model")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = key(
        "auto", "number format of weights and KV; auto: what the model's config.json says"
    )
    implementation: Literal["auto", "native", "transformers"] = key(
        "auto", "code that runs the model; auto: native where the architecture is, else transformers"
    )
    quantization: Literal["none", "int8", "int4"] = key(
        "none", "weights in fewer bits, made when they are loaded; a quantized checkpoint needs none"
    )
    device: str = key(
        "auto",
        "auto, cpu, cuda, cuda:N, or another chip (npu, mlu, musa); auto: a GPU or chip where there is one",
        pattern=r"^[a-z]+(:\d+)?$",
    )
    chat_template: Word | None = key(None, "file with a chat template (Jinja); none: the model's own")
    special_tokens_in_messages: bool = key(
        False, "special tokens that a chat message spells are those tokens; off: they are text"
    )
    max_model_len: int | None = key(
        None, "longest prompt plus output in tokens; none: what the model was made for", ge=2
    )
    revision: str | None = key(None, "branch, tag or commit on the hub")
    offline: bool = key(False, "take hub models from the local cache only")
    served_name: str | None = key(None, "the name that clients use; none: the model's own")


class ShareConfig(Section):
    """Fractions of the KV pool for one tenant or one class of service."""

    guaranteed: Fraction = key(0.0, "what it can always have")
    ceiling: float | None = key(None, "what it can never exceed; none: all", gt=0.0, le=1.0)

    @model_validator(mode="after")
    def _ceiling_covers_guarantee(self) -> ShareConfig:
        if self.ceiling is not None and self.ceiling < self.guaranteed:
            raise ValueError(f"the ceiling ({self.ceiling}) is below what is guaranteed ({self.guaranteed})")
        return self


class KVConfig(Section):
    """The KV cache: size, index, pool, eviction."""

    block_size: int = key(16, "tokens per block", ge=1, le=1024)
    num_blocks: int | None = key(None, "blocks in the pool; none: by memory_fraction", ge=1, le=2**31 - 1)
    memory_fraction: float | None = key(
        None,
        f"share of the device's free memory for KV; none: {GPU_MEMORY_SHARE} on a GPU, "
        f"{CPU_MEMORY_SHARE} on a CPU",
        gt=0.0,
        lt=1.0,
    )
    host_gb: float = key(
        0.0,
        "host memory (GiB) behind the device's KV pool, also for preempted requests; 0: none",
        ge=0.0,
        le=16384.0,
    )
    disk_gb: float = key(0.0, "disk (GiB) behind that, in kv.dir; 0: none", ge=0.0, le=1048576.0)
    dir: Word | None = key(None, "folder of the disk tier; one server owns it")
    disk_min_uses: int = key(
        1, "a block goes to the disk when so many prompts have had it; 1: at once", ge=1, le=100
    )
    write_policy: Literal["write_through", "write_back"] = key(
        "write_through",
        "KV goes below the device when it is computed, or (write_back) when the device is about to evict it",
    )
    free_watermark: float = key(
        0.05,
        "with write_back: share of the device's pool that is kept free; at least two full steps",
        ge=0.0,
        le=0.25,
    )
    max_save_gb_per_s: float | None = key(
        None, "bound for saving blocks below the device (GB/s); none: no bound", gt=0.0
    )
    load_hot: bool = key(
        True, "while idle, load what stored prompts share from host memory and disk into free blocks"
    )
    codec: Word = key(
        "raw",
        "how blocks are stored on disk and remotely: raw, zstd (exact), int8 (half the size, up to 0.8 % "
        "off), delta (a quarter, up to 13 % off)",
    )
    remote_url: Word | None = key(
        None, "Valkey or Redis server with KV that instances share: redis://HOST; none: none", repr=False
    )
    remote_gb: float = key(
        64.0, "what this instance puts there (GiB) within kv.remote_ttl_s", gt=0.0, le=1048576.0
    )
    remote_ttl_s: float = key(
        86400.0, "seconds until a block there that is not used goes", gt=0.0, le=31536000.0
    )
    index: Word = key("radix", "prefix index")
    pool: Word = key("free_list", "block pool")
    share_pool: bool | None = key(
        None,
        "other instances of this host read KV where it lies, by one copy, of a pool on a CPU, which has no "
        "huge pages then; default: in a fleet on one host",
    )
    eviction: Word = key("adaptive", "eviction policy")
    eviction_options: dict[str, Any] = key({}, "options of that policy")
    miss_attribution: bool = key(False, "count why blocks had to be computed; hashes every evicted block")
    prefix_caching: bool = key(True, "reuse the KV of earlier requests with the same prefix")
    index_as_computed: bool = key(
        False, "cache a prompt's blocks chunk by chunk, not once all of it is computed"
    )
    approximate_reuse: bool = key(
        False, "requests may ask for KV of equal text at other positions; it changes their answers"
    )
    approximate_recompute_tokens: int = key(
        16, "first tokens of each text reused so that are computed again; texts of twice as many are found",
        ge=1, le=4096,
    )  # fmt: skip
    compress_reasoning: bool = key(
        False, "requests may ask that old KV of their reasoning is dropped; it changes their answers"
    )
    checkpoint_interval: Positive = key(
        256, "tokens between checkpoints of a recurrent state in decode; for models that have such states"
    )
    max_pinned_share: Fraction = key(0.25, "share of the pool that pinned prefixes may hold")
    tenant_shares: dict[str, ShareConfig] = key(
        {}, "KV quotas by tenant, shares of the pool: {NAME: {guaranteed: 0.25, ceiling: 0.5}}"
    )
    class_shares: dict[str, ShareConfig] = key({}, "KV quotas by class of service, the same way")
    sharing_groups: dict[str, tuple[str, ...]] = key(
        {}, "group: tenants that share cached prefixes with each other"
    )

    @field_validator("tenant_shares", "class_shares")
    @classmethod
    def _guarantees_fit(cls, shares: dict[str, ShareConfig]) -> dict[str, ShareConfig]:
        promised = sum(share.guaranteed for share in shares.values())
        if promised > 1.0 + 1e-9:
            raise ValueError(f"guarantees sum to {promised:g}; together they can have at most 1 (the pool)")
        return shares

    @model_validator(mode="after")
    def _disk_has_a_folder(self) -> KVConfig:
        if self.disk_gb and self.dir is None:
            raise ValueError("disk_gb needs a folder on that disk: set kv.dir")
        return self

    @model_validator(mode="after")
    def _write_back_has_a_tier(self) -> KVConfig:
        if self.write_policy == "write_back" and not self.has_tiers:
            raise ValueError("write_back has nowhere to write: set kv.host_gb, kv.disk_gb or kv.remote_url")
        return self

    @field_validator("sharing_groups")
    @classmethod
    def _one_group_each(cls, groups: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        tenants = [tenant for names in groups.values() for tenant in names]
        twice = sorted({tenant for tenant in tenants if tenants.count(tenant) > 1})
        if twice:
            raise ValueError(f"tenant {twice[0]!r} is named twice: a tenant belongs to one group")
        if "" in tenants:
            raise ValueError(
                "the tenant without a name stands for all requests that name none: list the names that share"
            )
        return groups

    @property
    def group_of(self) -> dict[str, str]:
        """By tenant, the group with which it shares cached prefixes."""
        return {name: group for group, names in self.sharing_groups.items() for name in names}

    @property
    def has_tiers(self) -> bool:
        """Whether KV is kept below the device."""
        return bool(self.host_gb or self.disk_gb or self.remote_url)

    @property
    def host_bytes(self) -> int:
        return int(self.host_gb * 2**30)

    def memory_share(self, device: str) -> float:
        """`memory_fraction`, or what is usual on that device ('cpu', 'cuda:0', ...)."""
        if self.memory_fraction is not None:
            return self.memory_fraction
        return CPU_MEMORY_SHARE if device.startswith("cpu") else GPU_MEMORY_SHARE


class SchedulerConfig(Section):
    """How a step is planned."""

    max_num_seqs: int = key(64, "rows of the batch: requests that run together", ge=1, le=65536)
    max_batched_tokens: Positive = key(2048, "tokens computed in one step, prefill and decode")
    strategy: Word = key("priority", "scheduling passes, by a name")
    passes: tuple[str, ...] | None = key(None, "scheduling passes in order; none: those of the strategy")
    pass_options: dict[str, dict[str, Any]] = key({}, "options by name of pass")

    @model_validator(mode="after")
    def _budget_covers_rows(self) -> SchedulerConfig:
        if self.max_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running request computes one token per step"
            )
        return self


class SpeculativeConfig(Section):
    """Speculative decoding: several tokens of a request in one step, the output unchanged."""

    method: Word = key(
        "none",
        "what proposes tokens: none, prompt_lookup (n-grams of the request's own), suffix (own text and "
        "earlier outputs), draft_model (method_options: {model: FOLDER}), self_draft (the model with weights "
        "in int4, or method_options: {layers: N}), heads (the model's draft head or MTP layer), or auto: "
        "heads where the model has one, else suffix; "
        "synthetic (method_options: {acceptance: 0.7}) is for benchmarks: its answers are made-up tokens",
    )
    method_options: dict[str, Any] = key({}, "options of that method")
    num_tokens: int = key(8, "most tokens proposed for a request and step", ge=1, le=64)
    adaptive: bool = key(True, "verify only proposed tokens that make decoding faster, as measured")
    reasoning_model: Word | None = key(
        None,
        "folder or hub name of a small model with the same tokens, which writes steps of reasoning for "
        "requests with speculative_reasoning (that changes their output); none: they are refused",
    )


class EngineConfig(Section):
    """The loop and its machine."""

    backend: Word = key("native", "what computes the steps")
    backend_options: dict[str, Any] = key({}, "options of that backend")
    threads: int | None = key(
        None, "CPU threads of each rank; none: by model size, one per physical core at most", ge=1, le=4096
    )
    seed: int = key(0, "seed of requests that bring none", ge=0, lt=2**63)
    kernels: Literal["auto", "off"] = key("auto", "kernels, compiled when first needed; off: torch alone")
    recorded_steps: bool = key(
        True, "record decode steps and replay them (with kernels; on CPUs up to 32 positions)"
    )
    overlap: bool = key(False, "plan the next step while one computes")


class ParallelConfig(Section):
    """Several processes (ranks) on this machine run one model."""

    tensor: int = key(1, "ranks that share each layer, by heads and columns of MLPs", ge=1, le=64)
    pipeline: int = key(1, "ranks to which layers are dealt", ge=1, le=64)
    whole_experts: bool = key(
        False, "with tensor or ffn: each rank has some experts whole; off: a part of every expert"
    )
    ffn: int = key(
        0, "ranks that compute MLPs and experts for a first one, which has attention and all KV", ge=0, le=64
    )
    micro_batch_tokens: Positive = key(
        64, "with ffn: a step is cut in two parts that take turns, if both have so many tokens"
    )
    backend: Word | None = key(
        None,
        "collectives that add up the ranks' parts: shared_memory, torch_distributed (gloo), auto (a measured "
        "table), or another plug-in; unset: shared_memory, or gloo where its kernel does not compile",
    )
    backend_options: dict[str, Any] = key(
        {}, "its options, such as the file of a table for auto: {table: FILE}"
    )

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline + self.ffn


class ServerConfig(Section):
    """The HTTP server."""

    host: Word = key("127.0.0.1", "address to listen on; 0.0.0.0: all")
    port: int = key(int(SagePorts.HTTP), "TCP port; 0: a free one", ge=0, le=65535)
    api_key: Word | None = key(None, "key that clients must send", repr=False)
    admin_key: Word | None = key(
        None, "key for /v1/admin: pins, cache, policy, strategy; none: answered 403", repr=False
    )
    client_keys: dict[str, Word] = key({}, "further keys, by the name of the client that has it", repr=False)
    trust_user: bool = key(
        False, "a request's user is its client (behind a gateway); false: its key's name, or address"
    )
    max_waiting: Positive = key(1024, "sequences that may wait; more are answered 429")
    client_waiting_share: float = key(
        0.75, "share of max_waiting, as far as others leave it, that one client may fill", gt=0.0, le=1.0
    )
    max_n: int = key(MAX_N, "most choices (n) of one request", ge=1, le=MAX_N)
    max_request_tokens: Positive | None = key(
        2**20, "most tokens of one request, prompts and n x max_tokens; one whole context always may"
    )
    max_client_tokens: Positive | None = key(
        None, "the same of all open requests of one client; more are answered 429"
    )
    reasoning_budgets: dict[Effort, Annotated[int, Field(ge=0)]] = key(
        {}, "max_reasoning_tokens of chats without any, by reasoning_effort: {low: 512, high: 8192}"
    )
    soft_reasoning_budgets: dict[Effort, Annotated[int, Field(ge=0)]] = key(
        {}, "soft_reasoning_tokens of chats without any, by reasoning_effort: {low: 256, high: 4096}"
    )
    prefill_next_turn: bool = key(
        True, "compute what a chat's next turn begins with, without its reasoning, while the engine idles"
    )
    remembered_tokens: int = key(
        2**20, "tokens of the last answers that branch_from may go on from; 0: none", ge=0, le=2**30
    )
    max_priority: int | None = key(
        0, "highest priority that a request may ask for (any may ask for less); none: any"
    )
    tier_priorities: dict[str, int] = key(
        {"priority": 1, "flex": -1}, "what a request's service_tier adds to its priority"
    )
    max_body_bytes: int = key(32 * 2**20, "largest request body; larger ones are answered 413", ge=1024)
    max_connections: int = key(2048, "open connections; more are answered 503 and closed", ge=1, le=2**20)
    header_timeout_s: Seconds = key(10.0, "seconds in which a request's headers must arrive")
    body_timeout_s: Seconds = key(60.0, "seconds in which a request's body must arrive")
    send_timeout_s: Seconds = key(
        60.0, "seconds after which a client that reads nothing of its answer is cut off"
    )
    keep_alive_timeout_s: Seconds = key(30.0, "seconds that a connection stays open between requests")
    shutdown_grace_s: float = key(
        20.0, "seconds that running requests have to end at shutdown; the rest is cut off", ge=0.0, le=86400.0
    )
    expert_metrics: bool = key(
        False, "show in /metrics how many rows each expert has computed: a series per layer and expert"
    )
    cors_origins: tuple[Annotated[str, Field(pattern=ORIGIN)], ...] = key(
        (), "origins whose pages may call the server, as https://host:port; *: all"
    )


class EventsConfig(Section):
    """KV events for routers, in vLLM's wire form over ZeroMQ."""

    endpoint: Word | None = key(
        None,
        f"where to publish, as tcp://*:{int(SagePorts.KV_EVENTS)}; none: nowhere; instances of a fleet add "
        "their number to the port",
    )
    replay_endpoint: Word | None = key(
        None, f"where readers ask for what they missed, as tcp://*:{int(SagePorts.KV_EVENTS_REPLAY)}"
    )
    topic: str = key(
        "", "topic of the messages; llm-d reads kv@POD@MODEL; {instance}: an instance's name in a fleet"
    )
    hash_form: Literal["int64", "bytes"] = key(
        "int64", "form of block hashes: 64-bit numbers (all readers) or whole"
    )
    buffer_steps: int = key(10_000, "batches kept for replay", ge=1, le=10_000_000)

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _port_exists(cls, endpoint: str | None) -> str | None:
        scheme, _, port = (endpoint or "").rpartition(":")
        if scheme.startswith("tcp:") and port.isdigit() and int(port) > 65535:
            raise ValueError(f"port {port} does not exist: the highest is 65535")
        return endpoint

    @model_validator(mode="after")
    def _replay_needs_events(self) -> EventsConfig:
        if self.replay_endpoint is not None and self.endpoint is None:
            raise ValueError("replay_endpoint needs endpoint: set events.endpoint too")
        return self


class LogConfig(Section):
    """What is written to stderr."""

    level: Literal["debug", "info", "warning", "error"] = key("info", "least level that is shown")
    format: Literal["text", "json"] = key("text", "form of the lines; json: an object a line")
    requests: bool = key(True, "a line for each HTTP request, without its prompt (level info)")


class Config(Section):
    """All of it. `Config()` serves the demo model on this machine."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    kv: KVConfig = Field(default_factory=KVConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = Field(default_factory=SpeculativeConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    events: EventsConfig = Field(default_factory=EventsConfig)
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    def flat(self) -> dict[str, Any]:
        """Every key, dotted, with its value, in order of declaration."""
        return {f"{section}.{name}": value for section, keys in self for name, value in keys}


SECRET_KEYS = frozenset(
    {"fleet.shared_key", "kv.remote_url", "server.admin_key", "server.api_key", "server.client_keys"}
)
"""Keys whose value is never shown."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "laptop": {
        "scheduler.max_num_seqs": 8,
        "scheduler.max_batched_tokens": 512,
        "kv.memory_fraction": 0.15,
        "server.max_waiting": 64,
    },
    "throughput": {
        "scheduler.max_num_seqs": 256,
        "scheduler.max_batched_tokens": 8192,
        "scheduler.strategy": "throughput",
        "server.max_waiting": 8192,
        "server.max_connections": 16384,
    },
    "low_latency": {
        "scheduler.max_num_seqs": 16,
        "scheduler.max_batched_tokens": 512,
        "server.max_waiting": 64,
    },
    "fifo": {"scheduler.strategy": "fifo"},
    "priority": {"scheduler.strategy": "priority"},
    "slo": {"scheduler.strategy": "slo"},
    "fair": {"scheduler.strategy": "fair"},
    "adaptive": {"scheduler.strategy": "adaptive"},
    "vllm-like": {"scheduler.strategy": "vllm-like", "kv.eviction": "lru", "kv.index_as_computed": True},
}
"""Starting points by name: what to trade for what.

`laptop`: little memory, few users. `throughput`: wide batches and large chunks, at the cost of each user's
time per token. `low_latency`: narrow batches and small chunks, the reverse. The others choose how the queue
is scheduled and nothing else; `vllm-like` decides as vLLM does, cache included: the baseline.
"""
