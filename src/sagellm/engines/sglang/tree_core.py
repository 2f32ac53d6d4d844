"""SGLang's Python TreeCore in which a policy of ours chooses what leaves the device.

SGLang's tree stays the tree: matches, inserts, locks, host copies (HiCache) and storage are its own. A
`Mirror` follows locks and inserts. When SGLang evicts full-attention KV, the mirror's policy says which leaf,
and how many pages of its end. Such a leaf is split first, as SGLang splits one for a match; the rest of the
walk (back-up to the host, removal) is SGLang's.

If anything is not as expected, SGLang's own choice is used, once and for good, with one warning.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import EvictDeviceNextNodeResult

from sagellm.core.blocks import cdiv
from sagellm.core.protocols.eviction import NO_USE, Use
from sagellm.core.types import Tokens
from sagellm.engines.guests.request_hints import NO_HINTS, RequestHints
from sagellm.engines.sglang.mirror import Mirror, Victim, names_of, namespace_of, path_of_ids

logger = logging.getLogger("sagellm.sglang")
FULL = ComponentType.FULL
ID_BYTES = 8
CORE_NAMES = (
    "reset", "inc_lock_ref", "dec_lock_ref", "begin_insert", "resume_insert", "commit_load_back",
    "evict_device_start", "evict_device_next_node", "evict_device_end", "node_by_id", "_split_node",
    "page_size", "root_node", "evictable_device_leaves", "components_by_type",
)  # fmt: skip
NODE_NAMES = ("id", "key", "parent", "children", "evicted")
KEY_NAMES = ("extra_key", "cache_salt", "raw_token_ids", "child_key_at")


def require_names(core: Any) -> None:
    """Raise `AttributeError` naming what this version of SGLang lacks."""
    wanted: tuple[tuple[Callable[[], Any], tuple[str, ...]], ...] = (
        (lambda: core, CORE_NAMES),
        (lambda: core.root_node, NODE_NAMES),
        (lambda: core.root_node.key, KEY_NAMES),
    )
    for get, names in wanted:
        found = get()
        missing = [name for name in names if not hasattr(found, name)]
        if missing:
            raise AttributeError(f"{type(found).__name__} of this SGLang has no {', '.join(missing)}")


class GuidedTreeCore(UnifiedTreeCore):  # type: ignore[misc]
    """SGLang's TreeCore; `guide` hands the choice of victims to a mirror's policy, until `give_back`."""

    def __init__(self, params: Any, components: Any) -> None:
        self.mirror: Mirror | None = None
        self._new_mirror: Callable[[], Mirror] | None = None
        self._reset_guide()
        super().__init__(params, components)

    def guide(self, new_mirror: Callable[[], Mirror], free_tokens: Callable[[], int]) -> None:
        """Let a policy choose. The tree must be empty. `free_tokens`: those that the pool has free."""
        self._new_mirror, self._free_tokens = new_mirror, free_tokens
        self.mirror = new_mirror()

    def _reset_guide(self) -> None:
        self._inserting: Any = None
        self._ends: dict[int, tuple[Use, RequestHints]] = {}
        self._victims: list[Victim] = []
        self._quota = 0
        self.wanted_free: int | None = None
        self.num_unknown = 0

    @property
    def is_guided(self) -> bool:
        """Whether a policy chooses."""
        return self.mirror is not None

    def give_back(self, reason: str) -> None:
        """SGLang's own choice from now on; what is cached stays."""
        if self.mirror is not None:
            self.mirror = self._new_mirror = None
            self._victims.clear()
            logger.warning("sageLLM: SGLang evicts in its own order from now on: %s", reason)

    def _follow(self, listener: Callable[..., Any], *arguments: Any) -> Any:
        """Tell the mirror while it guides; an error gives SGLang's own choice back."""
        if self.mirror is None:
            return None
        try:
            return listener(self.mirror, *arguments)
        except Exception as error:
            logger.debug("sageLLM: %s failed", listener.__name__, exc_info=True)
            self.give_back(f"{type(error).__name__}: {error}")
            return None

    # -- what SGLang calls

    def reset(self) -> None:
        super().reset()
        self._reset_guide()
        if self._new_mirror is not None:
            self.mirror = self._new_mirror()

    def begin_insert(self, params: Any) -> Any:
        step = super().begin_insert(params)
        self._inserting = params.key
        self._follow(self._insert_step, step)
        return step

    def resume_insert(self) -> Any:
        step = super().resume_insert()
        self._follow(self._insert_step, step)
        return step

    def inc_lock_ref(self, node_id: int, *arguments: Any, **options: Any) -> Any:
        result = super().inc_lock_ref(node_id, *arguments, **options)
        self._follow(self._hold, node_id)
        return result

    def dec_lock_ref(self, node_id: int, *arguments: Any, **options: Any) -> Any:
        result = super().dec_lock_ref(node_id, *arguments, **options)
        self._follow(self._release, node_id)
        return result

    def inc_full_pin(self, node_id: int) -> None:
        super().inc_full_pin(node_id)
        self._follow(self._hold, node_id)

    def dec_full_pin(self, node_id: int) -> None:
        super().dec_full_pin(node_id)
        self._follow(self._release, node_id)

    def commit_load_back(self, node_id: int, *arguments: Any, **options: Any) -> Any:
        actions = super().commit_load_back(node_id, *arguments, **options)
        self._follow(self._loaded, node_id)
        return actions

    def evict_device_start(self, component_type: Any, request_cnt: int) -> None:
        if component_type is FULL and self.mirror is not None:
            self._quota = request_cnt
        else:
            super().evict_device_start(component_type, request_cnt)

    def evict_device_next_node(self, component_type: Any, tracker: Any) -> Any:
        if self._walks(component_type):
            return super().evict_device_next_node(component_type, tracker)
        if self._missing_tokens(tracker[FULL]) <= 0:
            return EvictDeviceNextNodeResult()
        chosen = self._follow(self._next_victim, tracker[FULL])
        if chosen is None:  # the policy has nothing more, or has failed: SGLang may know of other leaves
            super().evict_device_start(component_type, self._quota)
            return super().evict_device_next_node(component_type, tracker)
        node_id, action = chosen
        result = EvictDeviceNextNodeResult(node_id=node_id, made_progress=True)
        if action is not None:
            result.cache_actions.append(action)
        return result

    def evict_device_end(self, component_type: Any) -> None:
        self._follow(self._keep_rest)
        self._victims.clear()
        if self._walks(component_type):
            super().evict_device_end(component_type)

    def _walks(self, component_type: Any) -> bool:
        """SGLang's own walk is under way."""
        return bool(self.components_by_type[component_type].is_evict_device_ongoing)

    # -- what requests do, from the cache

    def locks_move(self) -> None:
        """A checkpoint begins: it moves a request's lock."""
        self._follow(Mirror.locks_move)

    def locks_moved(self) -> None:
        """The checkpoint is over."""
        self._follow(Mirror.locks_moved)

    def request_began(self, node_id: int) -> None:
        """A request reuses the path to the node that it has locked."""
        self._follow(Mirror.request_began, node_id)

    def request_ends(self, node_id: int, use: Use, said: RequestHints) -> None:
        """The next release of this node ends a request."""
        if self.mirror is not None:
            self._ends[node_id] = use, said

    # -- inside: following

    def _insert_step(self, mirror: Mirror, step: Any) -> None:
        if step.result is None:
            return
        key, self._inserting = self._inserting, None
        if key is None or step.result.rotation_tail_declined:
            return
        ids = key.raw_token_ids()
        num_tokens = len(ids) - len(ids) % self.page_size
        mirror.inserted(step.result.last_device_node, path_of_ids(ids[:num_tokens]), namespace_of(key))

    def _device_path(self, node_id: int) -> Tokens:
        """What the device has of the path to a node."""
        pieces: list[Any] = []
        node = self.node_by_id(node_id)
        while node is not self.root_node:
            if node.evicted:
                pieces.clear()
            else:
                pieces.append(node.key.raw_token_ids())
            node = node.parent
        return path_of_ids(*reversed(pieces))

    def _hold(self, mirror: Mirror, node_id: int) -> None:
        mirror.hold(node_id, self._device_path(node_id), namespace_of(self.node_by_id(node_id).key))

    def _loaded(self, mirror: Mirror, node_id: int) -> None:
        mirror.inserted(node_id, self._device_path(node_id), namespace_of(self.node_by_id(node_id).key))

    def _release(self, mirror: Mirror, node_id: int) -> None:
        mirror.release(node_id, *self._ends.pop(node_id, (NO_USE, NO_HINTS)))

    # -- inside: choosing

    def _missing_tokens(self, num_evicted: int) -> int:
        """Tokens to evict still: what the pool lacks, or what was asked for."""
        missing = self._quota - num_evicted
        return missing if self.wanted_free is None else min(missing, self.wanted_free - self._free_tokens())

    def _next_victim(self, mirror: Mirror, num_evicted: int) -> tuple[int, Any] | None:
        while True:
            if not self._victims:
                num_pages = cdiv(self._missing_tokens(num_evicted), self.page_size)
                self._victims = mirror.choose(num_pages)
                if not self._victims:
                    return None
            node = self._leaf_at(self._victims[0])
            if node is not None:
                return self._cut(node)
            self._victims.pop(0)
            self.num_unknown += 1

    def _leaf_at(self, victim: Victim) -> Any:
        """The leaf that ends where the victim does.

        None if SGLang has it locked or elsewhere by now.
        """
        ids = array("q")
        ids.frombytes(victim.data)
        extra, salt = names_of(victim.namespace)
        sample = RadixKey(ids, extra, cache_salt=salt)
        node, end = self.root_node, 0
        while end < len(sample):
            node = node.children.get(sample.child_key_at(end, self.page_size))
            if node is None:
                return None
            end += len(node.key)
        return node if end == len(sample) and node in self.evictable_device_leaves else None

    def _cut(self, node: Any) -> tuple[int, Any]:
        """The node to evict for the first victim, split from what stays."""
        victim, size = self._victims[0], self.page_size
        num_pages = len(node.key) // size
        if victim.num_pages > num_pages:
            victim.num_pages -= num_pages
            victim.data = victim.data[: -num_pages * size * ID_BYTES]
            return node.id, None
        self._victims.pop(0)
        if victim.num_pages == num_pages:
            return node.id, None
        action = self._split_node(node.key, node, (num_pages - victim.num_pages) * size)[1]
        return node.id, action

    def _keep_rest(self, mirror: Mirror) -> None:
        for victim in self._victims:
            mirror.keep(victim)
