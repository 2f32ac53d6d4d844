"""The nouns that every module shares: tokens, namespaces, sampling parameters, requests, capabilities."""

from __future__ import annotations

import math
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from sagellm.core.blocks import cdiv
from sagellm.core.errors import RequestError, shown
from sagellm.core.field_checks import as_bias, as_tuple, in_range, is_integer, is_number, wrong_type
from sagellm.core.kv_hints import KVHintsEnvelope

if TYPE_CHECKING:
    from sagellm.core.protocols.prefix_cache import MissCounts, PromptSpan

TOKEN_BYTES = 4
MAX_LOGPROBS, MAX_N = 20, 128
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 1024
MAX_RETENTIONS = 64
MIN_REPETITION_PENALTY = 0.01
_INT32 = "i"
SAMPLING_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "repetition_penalty": (MIN_REPETITION_PENALTY, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "n": (1, MAX_N),
    "min_tokens": (0, math.inf),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "max_tokens": (0, math.inf),
    "max_reasoning_tokens": (0, math.inf),
    "max_reasoning_kv_tokens": (1, math.inf),
    "num_speculative_tokens": (0, 64),
    "soft_reasoning_tokens": (0, math.inf),
    "soft_reasoning_slope": (0.0, 100.0),
}
BlockIds: TypeAlias = "array[int]"
"""Ids of blocks in order of position, as one int32 buffer (`array("i")`)."""
_INT32_MAX = 2**31 - 1
_HIGH_BYTE = TOKEN_BYTES - 1 if sys.byteorder == "little" else 0


class Tokens:
    """Token ids as one contiguous int32 buffer, with their bytes.

    A prompt is converted once, when it arrives; from then on prefixes are compared as memory. Tokens can be
    appended; `tobytes` is cached until then.
    """

    __slots__ = ("_bytes", "_ids")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids: array[int] = ids._ids[:] if isinstance(ids, Tokens) else _to_int32(ids)
        self._bytes: bytes | None = None

    @classmethod
    def frombytes(cls, data: bytes) -> Tokens:
        """The tokens whose native-endian int32 bytes are `data`."""
        tokens = cls()
        tokens._ids.frombytes(data)
        return tokens

    def append(self, token_id: int) -> None:
        self._ids.append(token_id)

    def extend(self, ids: Iterable[int]) -> None:
        self._ids.extend(ids)

    def pop(self) -> int:
        """Remove the last token and return it."""
        self._bytes = None
        return self._ids.pop()

    def tobytes(self) -> bytes:
        """Native-endian int32 bytes, 4 per token."""
        data = self._bytes
        if data is None or len(data) != TOKEN_BYTES * len(self._ids):
            data = self._bytes = self._ids.tobytes()
        return data

    @property
    def live(self) -> array[int]:
        """The buffer itself, for `append_each`. Only append to it."""
        return self._ids

    def view(self) -> memoryview:
        """A zero-copy int32 view; release it before the next `append`."""
        return memoryview(self._ids)

    def slice(self, start: int, stop: int | None = None) -> array[int]:
        return self._ids[start:stop]

    def tolist(self) -> list[int]:
        return self._ids.tolist()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> int:
        return self._ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and self._ids == other._ids

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        head = ", ".join(map(str, self._ids[:8]))
        return f"Tokens([{head}{', ...' if len(self) > 8 else ''}], len={len(self)})"


def append_each(buffers: Iterable[array[int]], values: Iterable[int]) -> None:
    """Append one value to each buffer, without a loop in Python."""
    deque(map(array.append, buffers, values), maxlen=0)


class Namespace(NamedTuple):
    """Tenant or cache salt, model, adapter, KV dtype. KV of different namespaces is never shared."""

    tenant: str = ""
    model: str = ""
    adapter: str = ""
    kv_dtype: str = ""


def _to_int32(ids: Iterable[int]) -> array[int]:
    """An int32 array of the ids. Python fills an unsigned array from a list three times faster than a signed
    one."""
    if not isinstance(ids, list):
        return array(_INT32, ids)
    try:
        unsigned = array("I", ids)
    except OverflowError:  # a negative number, or one that is too large for either
        return array(_INT32, ids)
    data = unsigned.tobytes()
    if not data[_HIGH_BYTE::TOKEN_BYTES].isascii():  # the highest bit of some id is set
        raise OverflowError(f"{max(unsigned)} is no token id: it is greater than {_INT32_MAX}")
    return array(_INT32, data)


class Account(NamedTuple):
    """The tenant and the class of service that pay for blocks. The default has no name."""

    tenant: str = ""
    service_class: str = ""


NO_ACCOUNT = Account()


@dataclass(frozen=True, slots=True)
class Retention:
    """Soft retention of prompt tokens `[start, stop)` (`stop` None: to the end).

    A bias, not a lock: eviction treats the tokens as if they had been used `duration_s * priority / 100`
    seconds later. So the bias loses value every second, and `priority` 0 is none."""

    start: int = 0
    stop: int | None = None
    priority: int = 50
    duration_s: float = 300.0

    def __post_init__(self) -> None:
        in_range("retention.start", self.start, 0, math.inf)
        in_range("retention.priority", self.priority, 0, 100)
        in_range("retention.duration_s", self.duration_s, 0.0, math.inf)
        if self.stop is not None and self.stop <= self.start:
            raise RequestError(
                f"retention.stop ({self.stop}) must be greater than start ({self.start})", "retention"
            )

    @property
    def bonus_s(self) -> float:
        return self.duration_s * self.priority / 100


class FinishReason(str, Enum):
    """Why a request ended; the first two are OpenAI's words. MOVED: it goes on at another instance."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    MOVED = "moved"


class RequestStatus(Enum):
    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"
    """Blocks of its prompt are on their way to the device; passes do not see it."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SLO:
    """Latency goals of one request in seconds; None means no goal."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name, goal_s in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if goal_s is not None and not 0 <= goal_s <= sys.float_info.max:
                raise RequestError(f"{name} is a number of seconds from 0 on, or none: not {goal_s}", name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when generation ends.

    `temperature == 0` is greedy. Order of operations: logit_bias, min_tokens mask, penalties (repetition over
    prompt and output; presence and frequency over output), temperature, top_k, top_p, min_p, draw. `top_k <=
    0` and `top_p == 1` switch those off. The draw depends on (seed, position) alone, so a request gives the
    same tokens in any batch and after a preemption. Raises `RequestError` naming the parameter.

    `logprobs` asks for the log-probability of each generated token and of that many alternatives,
    `prompt_logprobs` for the same of each prompt token, given those before it. With `max_tokens == 0` the
    prompt is computed and nothing is generated.

    With `max_reasoning_tokens` at most so many tokens come between the markers of reasoning, and then the end
    marker, whatever the model would draw. Behind `soft_reasoning_tokens` of them the logit of the end marker
    is raised, with each token by `soft_reasoning_slope` (None: 0.1) more. With `max_reasoning_kv_tokens`
    later tokens see at most about so many of the reasoning. `reasoning_token_ids`: start and end marker;
    empty: those of the tokenizer, which `LLM` fills in.

    `num_speculative_tokens`: at most so many tokens are proposed in a step, where the engine speculates; 0:
    none, None: as many as for others. No token depends on it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    max_reasoning_tokens: int | None = None
    soft_reasoning_tokens: int | None = None
    soft_reasoning_slope: float | None = None
    max_reasoning_kv_tokens: int | None = None
    reasoning_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        stop: Any = self.stop
        several = (stop,) if isinstance(stop, str) else stop
        texts = as_tuple("stop", "a string or several", several, lambda value: isinstance(value, str))
        object.__setattr__(self, "stop", texts)
        for name in ("stop_token_ids", "reasoning_token_ids"):
            ids = as_tuple(name, "several token ids", getattr(self, name), is_integer)
            object.__setattr__(self, name, ids)
        object.__setattr__(self, "logit_bias", as_bias(self.logit_bias))
        for name, wanted, is_right in _FIELD_TYPES:
            if not is_right(value := getattr(self, name)):
                raise wrong_type(name, wanted, value)
        in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        for name, (low, high) in SAMPLING_RANGES.items():
            if (value := getattr(self, name)) is not None:
                in_range(name, value, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            excess = f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            raise RequestError(excess, "min_tokens")
        if self.soft_reasoning_slope is not None and self.soft_reasoning_tokens is None:
            lacks = "soft_reasoning_slope has no effect without soft_reasoning_tokens: set both, or neither"
            raise RequestError(lacks, "soft_reasoning_slope")
        self._check_stop()
        markers = self.reasoning_token_ids
        if markers and not len(markers) == len(set(markers)) == 2:
            given = "reasoning_token_ids must be two different ids: of the start and of the end marker"
            raise RequestError(f"{given}, got {shown(markers)}", "reasoning_token_ids")
        for token_id, bias in self.logit_bias.items():
            in_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0, param="logit_bias")

    def _check_stop(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", "stop")
        if any(not text for text in self.stop):
            raise RequestError("a stop string must not be empty", "stop")
        if any(len(text) > MAX_STOP_LENGTH for text in self.stop):
            raise RequestError(f"a stop string has at most {MAX_STOP_LENGTH} characters", "stop")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_reasoning_budget(self) -> bool:
        return self.max_reasoning_tokens is not None or self.soft_reasoning_tokens is not None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_KINDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "float": ("a number", is_number),
    "float | None": ("a number or None", lambda value: value is None or is_number(value)),
    "int": ("an integer", is_integer),
    "int | None": ("an integer or None", lambda value: value is None or is_integer(value)),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
}
_FIELD_TYPES = [
    (each.name, *_KINDS[kind]) for kind in _KINDS for each in fields(SamplingParams) if each.type == kind
]
"""Fields of `SamplingParams`: the name, what it must be in words, and the check."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to compute: a prompt and its sampling parameters.

    Immutable; its progress is a `RequestState`. Higher `priority` is served first. `group`: requests of one
    group share their prompt (`n > 1`): the first computes it, the others reuse it. `eos_token_ids` end the
    request unless `params.ignore_eos`. `service_class` names the class whose share of KV memory the
    request uses; `retention` biases eviction for ranges of its prompt. `session_id` is the name that later KV
    hints refer to; `kv_hints` are applied when the request ends, if it ran. `scripted_output`: a simulated
    answer ends by itself after that many tokens; no scheduling code may read it. `client`: API key or
    address, end user, call; the scheduler shares rows between siblings of that path. Empty: tenant, `group`.
    `reports_hit`: the blocks that it reuses are published as KV events, which do not show hits otherwise.
    `reports_eviction`: its first output tells what was evicted of its prompt, if misses are attributed.
    `approximate_reuse`: KV of equal tokens at other positions may be copied for it, which changes its answer.
    `generated`: tokens of its answer that another instance has drawn; this one goes on behind them, as after
    a preemption. `moves`: the request leaves with its next token, and goes on at another instance.
    `scored_from`: with `prompt_logprobs` only those of tokens behind this one, whose KV may be reused.
    """

    request_id: str
    tokens: Tokens
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: frozenset[int] = frozenset()
    arrival_s: float = 0.0
    priority: int = 0
    namespace: Namespace = Namespace()
    slo: SLO = SLO()
    group: str | None = None
    service_class: str = ""
    retention: tuple[Retention, ...] = ()
    session_id: str | None = None
    kv_hints: KVHintsEnvelope | None = None
    scripted_output: int | None = None
    client: tuple[str, ...] = ()
    reports_hit: bool = False
    reports_eviction: bool = False
    approximate_reuse: bool = False
    generated: tuple[int, ...] = ()
    moves: bool = False
    scored_from: int = 0

    def __post_init__(self) -> None:
        if not len(self.tokens):
            raise RequestError("the prompt is empty: send at least one token", "prompt")
        ids = as_tuple("generated", "several token ids", self.generated, is_integer)
        object.__setattr__(self, "generated", ids)
        if "\0" in self.namespace.tenant:
            raise RequestError("a tenant or cache salt must not hold NUL characters", "cache_salt")
        if len(self.retention) > MAX_RETENTIONS:
            raise RequestError(f"at most {MAX_RETENTIONS} ranges of retention", "retention")

    @property
    def account(self) -> Account:
        """The account that pays for its blocks, where there are quotas."""
        return Account(self.namespace.tenant, self.service_class)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token before temperature and filters, and the best others."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RequestOutput(NamedTuple):
    """What one step added to one request: the engine's answer, tokens only.

    `prompt_logprobs`: one for each prompt token but the first, which nothing predicts; given once, with the
    first token, to a request that asked for them. `error` explains a `FinishReason.ERROR`.
    The first output of a request and its last one also carry `queued_s`, the seconds from its arrival to the
    step that first scheduled it (None: it never was), `misses`, why blocks of its prompt had to be computed
    (None: misses are not attributed), and `evicted`, the part of its prompt that was evicted, if it asked
    for that. So do they `num_approximate_tokens`, the tokens whose KV was copied from another position.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    queued_s: float | None = None
    misses: MissCounts | None = None
    evicted: PromptSpan | None = None
    num_approximate_tokens: int = 0
    error_status: int = 500


class AttentionChunk(NamedTuple):
    """A token sees those before it in its chunk of the sequence.

    Chunks have `size` tokens.
    """

    size: int


Window = int | AttentionChunk
"""Which tokens a layer sees: so many latest ones, the newest included, or those of a chunk."""


def first_seen(window: Window | None, position: int) -> int:
    """The first position that the token at `position` sees."""
    if window is None:
        return 0
    if isinstance(window, AttentionChunk):
        return position - position % window.size
    return max(0, position + 1 - window)


def width(window: Window) -> int:
    """The most tokens that are seen at once."""
    return window.size if isinstance(window, AttentionChunk) else window


class KVGroup(NamedTuple):
    """Layers whose KV has a block table of its own. `window`: what a token sees; None: all before it."""

    layers: tuple[int, ...]
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class KVCacheSchema:
    """Shape of one token's KV and of a block.

    Two engines must have equal schemas before blocks can move. `layout` is the backend's own name for
    the order of axes; bytes can be copied as they are between equal layouts. Without `groups`, one block
    holds `block_size` tokens of all layers. With several groups it holds them for the layers of one group,
    in columns as wide as the widest layer: one takes a column, or as many narrower ones as fit. There
    are as many columns as the largest group needs. The first group sees furthest back, and those with the
    same window follow each other."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    layout: str
    model_fingerprint: str = ""
    groups: tuple[KVGroup, ...] = ()
    values_in_keys: bool = False
    """Values are a part of the keys (latent attention), so they take no memory."""
    state_bytes: int = 0
    """Of the recurrent states of one sequence, in all layers that have one; those layers have no KV."""
    layer_shapes: tuple[tuple[int, int], ...] = ()
    """KV heads and head dim of each layer with KV; empty: all have `num_kv_heads` of `head_dim`."""

    @property
    def state_pages(self) -> int:
        """Blocks of the pool that a checkpoint of the recurrent states takes."""
        return cdiv(self.state_bytes, self.bytes_per_page)

    @property
    def num_groups(self) -> int:
        """Blocks of the pool that `block_size` tokens take: one in each group."""
        return max(1, len(self.groups))

    @property
    def bytes_per_token(self) -> int:
        """Of all layers, without padding."""
        return self._bytes_per_number * sum(self._key_sizes)

    @property
    def bytes_per_page(self) -> int:
        """Of one block of the pool, which holds `block_size` tokens of one group."""
        if not self.groups:
            return self.bytes_per_token * self.block_size
        sizes = self._key_sizes
        widest = max(sizes)
        columns = max(cdiv(len(g.layers), widest // sizes[g.layers[0]]) for g in self.groups)
        return self._bytes_per_number * columns * widest * self.block_size

    @property
    def bytes_per_block(self) -> int:
        """Of `block_size` tokens in all groups."""
        return self.bytes_per_page * self.num_groups

    @property
    def padding_per_token(self) -> int:
        """Bytes of a token in all groups that no layer uses."""
        return self.bytes_per_block // self.block_size - self.bytes_per_token

    @property
    def _key_sizes(self) -> list[int]:
        """Numbers of a token's keys in each layer."""
        shapes = self.layer_shapes or ((self.num_kv_heads, self.head_dim),) * self.num_layers
        return [num_heads * head_dim for num_heads, head_dim in shapes]

    @property
    def _bytes_per_number(self) -> int:
        """Of each number of a key, with that of its value."""
        itemsize = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}
        return (2 - self.values_in_keys) * itemsize[self.dtype]


@dataclass(frozen=True, slots=True)
class CapabilityDescriptor:
    """What a backend can do: read by the builder, the router and the simulator.

    `sliding_window`: no token of any layer attends further back; None if some layer attends to all tokens.
    `prefill_token_s`: seconds per token of a long prompt (0: unknown); `prefill_token_squared_s`: in
    addition, per token and token before it. `weight_bytes`: bytes of weights that each step reads at least.
    """

    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    kv_schema: KVCacheSchema | None = None
    memory_bytes: int = 0
    features: frozenset[str] = frozenset()
    sliding_window: int | None = None
    prefill_token_s: float = 0.0
    prefill_token_squared_s: float = 0.0
    weight_bytes: int = 0
