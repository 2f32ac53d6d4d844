"""Ten faults of a KV cache, planted into our engine by replacing methods.

Production code has no hook for them. Most act on the native backend's KV around a step: a `Plant` sees
which blocks a request reuses, and spoils them as an engine with that bug would.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sagellm.core.plan import ExecutionPlan, Join, RequestState, StepResult
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import Namespace
from sagellm.engines.build import load
from sagellm.engines.llm import LLM
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.block_bytes import PoolBytes
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.rows import BatchRows
from sagellm.kvmgr.eviction import PrefillCostModel
from sagellm.kvmgr.manager.prefix_sharing import SharingGroups
from sagellm.kvmgr.manager.quotes import Quotes
from sagellm.serving import create_app
from tests.serving import live

BLOCK = 16
LATE_STEPS = 3
ADAPTER = "lora|"


class Plant:
    """Sees every step of the backend; subclasses spoil KV before or after it.

    `window`: the model that shows the fault has sliding windows of so many tokens.
    """

    window: int | None = None

    def __init__(self) -> None:
        self.tenants: dict[str, str] = {}
        self.step = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        execute, match = NativeBackend.execute, Quotes.match

        def planted_execute(backend: NativeBackend, plan: ExecutionPlan) -> StepResult:
            self.step += 1
            plan = self.before(backend, plan)
            result = execute(backend, plan)
            self.after(backend, plan)
            return result

        def planted_match(quotes: Quotes, state: RequestState) -> PrefixHit:
            self.tenants[state.request_id] = state.request.namespace.tenant
            return match(quotes, state)

        monkeypatch.setattr(NativeBackend, "execute", planted_execute)
        monkeypatch.setattr(Quotes, "match", planted_match)

    def before(self, backend: NativeBackend, plan: ExecutionPlan) -> ExecutionPlan:
        return plan

    def after(self, backend: NativeBackend, plan: ExecutionPlan) -> None: ...

    def load(self, folder: Path) -> LLM:
        """A small engine for it: the demo model, with sliding windows if the fault needs them."""
        if self.window is None:
            return load(None, {"kv.num_blocks": 160, "kv.host_gb": 0.05})
        shutil.copytree(DEMO_MODEL, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        (folder / "config.json").write_text(json.dumps(config | {"sliding_window": self.window}))
        return load(str(folder), {"kv.num_blocks": 160})


def reused(join: Join) -> tuple[int, ...]:
    """The blocks that a request gets with their KV."""
    return join.block_ids[: join.num_computed // BLOCK]


def zero(kv: PagedKV, block: int) -> None:
    for pool in (*kv.keys, *kv.values):
        pool[block] = 0


def copy_block(kv: PagedKV, source: int, target: int) -> None:
    for pool in (*kv.keys, *kv.values):
        pool[target] = pool[source]


class StaleBlock(Plant):
    """A prompt that was evicted is given its old block again, which has another prompt's KV by now."""

    def __init__(self) -> None:
        super().__init__()
        self._place: dict[tuple[str, bytes], int] = {}

    def after(self, backend: NativeBackend, plan: ExecutionPlan) -> None:
        for join in plan.joined:
            tenant = self.tenants.get(join.request_id, "")
            for index in range(min(join.num_prompt_tokens // BLOCK, len(join.block_ids))):
                key = (tenant, join.tokens[: 4 * BLOCK * (index + 1)])
                old = self._place.setdefault(key, join.block_ids[index])
                if index >= join.num_computed // BLOCK and old != join.block_ids[index]:
                    copy_block(backend._kv, old, join.block_ids[index])


class OffByOne(Plant):
    """A hit that leaves one token to compute counts that token as cached too: its KV is never written."""

    def after(self, backend: NativeBackend, plan: ExecutionPlan) -> None:
        for join in plan.joined:
            if join.num_computed > 0 and join.num_prompt_tokens % BLOCK == 1:
                block = join.block_ids[join.num_computed // BLOCK]
                for pool in (*backend._kv.keys, *backend._kv.values):
                    pool[block, 0] = 0


class WrongPosition(Plant):
    """What follows a hit is computed one position too far."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().install(monkeypatch)
        inputs = BatchRows.inputs

        def shifted(rows: BatchRows, plan: ExecutionPlan, *rest: Any, **named: Any) -> Any:
            made = inputs(rows, plan, *rest, **named)
            first = len(plan.decode_rows)
            hits = {join.row for join in plan.joined if join.num_computed}
            for op in plan.prefills:
                if op.row in hits:
                    made.positions[first : first + op.num_tokens] += 1
                first += op.num_tokens
            return dataclasses.replace(made, max_position=made.max_position + 1)

        monkeypatch.setattr(BatchRows, "inputs", shifted)


class CrossSalt(Plant):
    """The index leaves the salt out of its key."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SharingGroups, "namespace_of", lambda *_: Namespace())


class SwappedLayers(Plant):
    """A reused block is attached with the KV of layer 1 in layer 0."""

    def before(self, backend: NativeBackend, plan: ExecutionPlan) -> ExecutionPlan:
        for join in plan.joined:
            for block in reused(join)[-1:]:
                for pools in (backend._kv.keys, backend._kv.values):
                    pools[0][block] = pools[1][block]
        return plan


class WindowModel(Plant):
    """No fault; a model with sliding windows."""

    window = 4 * BLOCK


class DroppedWindowBlock(WindowModel):
    """The block in which the window of a hit begins counts as behind it, and is given up."""

    def before(self, backend: NativeBackend, plan: ExecutionPlan) -> ExecutionPlan:
        for join in plan.joined:
            first = (join.num_computed - self.window + 1) // BLOCK
            for block in reused(join)[first : first + 1] if first >= 0 else ():
                zero(backend._kv, block)
        return plan


class BitFlip(Plant):
    """A block that returns from host memory has one bit of one value flipped."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write_blocks = PoolBytes.write_blocks

        def flipped(pool: PoolBytes, block_ids: Sequence[int], data: Buffer) -> None:
            write_blocks(pool, block_ids, data)
            values = pool._arrays[-1].view(np.int32)
            values[list(block_ids), 0] ^= 1 << 27

        monkeypatch.setattr(PoolBytes, "write_blocks", flipped)
        # The demo model computes faster than it loads.
        monkeypatch.setattr(PrefillCostModel, "recompute_s", lambda self, extent: 1e9)


class WrongAdapter(Plant):
    """Two models are served, an adapter and its base; the index leaves the adapter out of its key.

    The adapter reads every token as the next one. `right` is the same server without the fault.
    """

    def __init__(self, *, right: bool = False) -> None:
        super().__init__()
        self._right = right

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().install(monkeypatch)
        create = create_app

        def with_adapter(*rest: Any, **named: Any) -> Any:
            app = create(*rest, **named)
            app.add_middleware(AdapterNames)
            return app

        def namespace_of(_: SharingGroups, namespace: Namespace) -> Namespace:
            salt = namespace.tenant.removeprefix(ADAPTER)
            adapter = ADAPTER if self._right and salt != namespace.tenant else ""
            return Namespace(tenant=salt, adapter=adapter)

        monkeypatch.setattr(live, "create_app", with_adapter)
        monkeypatch.setattr(SharingGroups, "namespace_of", namespace_of)

    def before(self, backend: NativeBackend, plan: ExecutionPlan) -> ExecutionPlan:
        joined = tuple(
            dataclasses.replace(join, tokens=_next_tokens(join.tokens))
            if self.tenants.get(join.request_id, "").startswith(ADAPTER)
            else join
            for join in plan.joined
        )
        return dataclasses.replace(plan, joined=joined)


def _next_tokens(data: bytes) -> bytes:
    tokens = array("i")
    tokens.frombytes(data)
    return array("i", ((token + 1) % 768 for token in tokens)).tobytes()


class AdapterNames:
    """ASGI: lists model "lora" too, and marks its requests by their salt."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/v1/models":
            models = [{"id": name, "max_model_len": 2048} for name in ("sagellm-demo", "lora")]
            body = json.dumps({"data": models}).encode()
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        parts, more = bytearray(), True
        while more:
            message = await receive()
            parts += message.get("body", b"")
            more = message.get("more_body", False)
        body = _marked(bytes(parts))
        kept = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        headers = [*kept, (b"content-length", str(len(body)).encode())]
        sent = False

        async def replay() -> Any:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body}

        await self._app({**scope, "headers": headers}, replay, send)


def _marked(body: bytes) -> bytes:
    request = json.loads(body)
    if request.get("model") == "lora" and isinstance(request.get("cache_salt", ""), str):
        request |= {"model": "sagellm-demo", "cache_salt": ADAPTER + request.get("cache_salt", "")}
    return json.dumps(request).encode()


class PartialBlock(Plant):
    """A block that agrees with a cached one in its first tokens only is taken from the cache whole."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, bytes], list[tuple[bytes, int]]] = {}

    def after(self, backend: NativeBackend, plan: ExecutionPlan) -> None:
        for join in plan.joined:
            tenant, size = self.tenants.get(join.request_id, ""), 4 * BLOCK
            for index in range(min(join.num_prompt_tokens // BLOCK, len(join.block_ids))):
                head, own = join.tokens[: size * index], join.tokens[size * index : size * (index + 1)]
                known = self._seen.setdefault((tenant, head), [])
                for other, block in known:
                    if other != own and other[: size // 2] == own[: size // 2]:
                        copy_block(backend._kv, block, join.block_ids[index])
                known.append((own, join.block_ids[index]))


class LateWrite(Plant):
    """A block that was computed in the last few steps is not written yet when another request reads it."""

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[int, int] = {}

    def before(self, backend: NativeBackend, plan: ExecutionPlan) -> ExecutionPlan:
        kv = backend._kv
        self._kept = []
        for join in plan.joined:
            for block in reused(join):
                if self.step - self._written.get(block, -LATE_STEPS) < LATE_STEPS:
                    self._kept.append((block, [pool[block].clone() for pool in (*kv.keys, *kv.values)]))
                    zero(kv, block)
        return plan

    def after(self, backend: NativeBackend, plan: ExecutionPlan) -> None:
        for block, saved in self._kept:
            for pool, values in zip((*backend._kv.keys, *backend._kv.values), saved, strict=True):
                pool[block] = values
        for join in plan.joined:
            for block in join.block_ids[len(reused(join)) :]:
                self._written[block] = self.step


FAULTS: dict[str, type[Plant]] = {
    "stale block after eviction": StaleBlock,
    "off by one at a border": OffByOne,
    "wrong position": WrongPosition,
    "cross-salt hit": CrossSalt,
    "swapped layers": SwappedLayers,
    "dropped window block": DroppedWindowBlock,
    "bit flip on return from host": BitFlip,
    "wrong adapter namespace": WrongAdapter,
    "partial block reused": PartialBlock,
    "late write": LateWrite,
}
