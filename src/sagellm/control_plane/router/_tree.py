"""A radix tree over the tokens of blocks, with the holders of each block.

An edge holds 1 to `MAX_EDGE_BLOCKS` whole blocks as bytes, so that a prompt is compared as memory. The
limit bounds what one event costs: an edge's bytes are copied when it is split, its bitsets when a block goes.
Holders are kept twice: of blocks in device memory, and of blocks in lower tiers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sagellm.core.errors import BookkeepingError

MAX_EDGE_BLOCKS = 512
DEPTH = (1 << 32) - 1
"""Mask of a position's depth; its upper bits are the number of an edge."""
FEW_BITS = 16
"""Up to so many bits `members` takes one by one, which is faster than as digits."""


class Holding:
    """The holders of one edge's blocks, by instance index.

    `full`: bitmask of the instances that hold all blocks of the edge. `partial`: of each other instance that
    holds some, a bitset with bit i for block i of the edge.
    """

    __slots__ = ("full", "partial")

    def __init__(self, full: int = 0) -> None:
        self.full = full
        self.partial: dict[int, int] = {}

    def add(self, instance: int, first: int, count: int, num_blocks: int) -> None:
        """The instance holds `count` of an edge's `num_blocks` blocks, from `first` on."""
        bit = 1 << instance
        if self.full & bit:
            return
        bits = ((1 << count) - 1) << first
        if count < num_blocks:
            bits |= self.partial.get(instance, 0)
        if bits == (1 << num_blocks) - 1:
            self.full |= bit
            self.partial.pop(instance, None)
        else:
            self.partial[instance] = bits

    def discard(self, instance: int, bits: int, num_blocks: int) -> None:
        """The instance holds the blocks of `bits` no longer."""
        bit = 1 << instance
        if self.full & bit:
            self.full ^= bit
            left = ((1 << num_blocks) - 1) & ~bits
        else:
            left = self.partial.get(instance, 0) & ~bits
        if left:
            self.partial[instance] = left
        else:
            self.partial.pop(instance, None)

    def drop(self, instance: int) -> None:
        """The instance holds nothing here any more."""
        self.full &= ~(1 << instance)
        self.partial.pop(instance, None)

    def bits_of(self, instance: int, num_blocks: int) -> int:
        """Bit i for each block i that the instance holds."""
        if self.full >> instance & 1:
            return (1 << num_blocks) - 1
        return self.partial.get(instance, 0)

    def is_held_by_others(self, instance: int) -> bool:
        return bool(self.full & ~(1 << instance)) or any(other != instance for other in self.partial)

    def split(self, at: int, num_blocks: int) -> Holding:
        """Keep what concerns the blocks from `at` on; return the holding of those before."""
        head = Holding(self.full)
        kept, self.partial = self.partial, {}
        low = (1 << at) - 1
        for instance, bits in kept.items():
            if bits & low:
                head.add_bits(instance, bits & low, at)
            if bits >> at:
                self.add_bits(instance, bits >> at, num_blocks - at)
        return head

    def add_bits(self, instance: int, bits: int, num_blocks: int) -> None:
        """Set the bits of an instance that holds nothing yet."""
        if bits == (1 << num_blocks) - 1:
            self.full |= 1 << instance
        else:
            self.partial[instance] = bits

    def resize(self, old: int, new: int) -> None:
        """The edge has `new` blocks, not `old`. None beyond `new` is held."""
        full, self.full = self.full, 0
        held = dict(self.partial)
        held |= dict.fromkeys(members(full), (1 << old) - 1)
        self.partial = {}
        for instance, bits in held.items():
            self.add_bits(instance, bits, new)

    def length(self, num_blocks: int) -> int:
        """The number of blocks up to the last one that is held."""
        if self.full:
            return num_blocks
        return max((bits.bit_length() for bits in self.partial.values()), default=0)


class Edge:
    """Blocks `start` to `end` of a path, below `parent`. A root has none. `number` never changes; positions
    name it, `num_positions` of them (`FleetTree`). `lower`: holders in tiers below the device; None: no
    holder yet. An edge without blocks is removed, and kept as long as positions name it."""

    __slots__ = (
        "block_bytes", "children", "device", "end", "lower", "num_positions", "number", "parent", "start",
        "tokens",
    )  # fmt: skip

    def __init__(self, number: int, block_bytes: int, parent: Edge | None, start: int, tokens: bytes) -> None:
        self.number = number
        self.num_positions = 0
        self.block_bytes = block_bytes
        self.parent = parent
        self.start = start
        self.end = start + len(tokens) // block_bytes
        self.tokens = bytearray(tokens)
        self.children: dict[bytes, Edge] = {}
        self.device = Holding()
        self.lower: Holding | None = None

    @property
    def num_blocks(self) -> int:
        return self.end - self.start

    @property
    def key(self) -> bytes:
        """By which its parent finds it: the bytes of its first block."""
        return bytes(self.tokens[: self.block_bytes])

    def holding(self, *, is_device: bool) -> Holding:
        if is_device:
            return self.device
        if self.lower is None:
            self.lower = Holding()
        return self.lower

    def common_blocks(self, data: bytes, offset: int, first: int = 0) -> int:
        """How many blocks from `first` on are those of `data` at `offset`."""
        size = self.block_bytes
        low, high = 0, min(self.num_blocks - first, (len(data) - offset) // size)
        at = first * size
        with memoryview(self.tokens) as tokens:
            step = high
            while low < high:
                begin = at + low * size
                with tokens[begin : begin + (step - low) * size] as piece:
                    is_equal = data.startswith(piece, offset + low * size)
                if is_equal:
                    low = step
                else:
                    high = step - 1
                step = (low + high + 1) // 2
        return low


class _Root(Edge):
    """The beginning of all prompts of one namespace and block size."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: tuple[str, str], block_bytes: int) -> None:
        super().__init__(-1, block_bytes, None, 0, b"")
        self.namespace = namespace


class FleetTree:
    """The edges of all namespaces and block sizes; a root for each pair.

    A position is one integer: an edge's number, and the block's depth in its path. It outlives a split of
    that edge: the tail keeps the number, and a depth before its start is found among its parents. So the
    number of a removed edge stays known until no position names it (`release`).
    """

    def __init__(self) -> None:
        self.roots: dict[tuple[str, str], dict[int, Edge]] = {}
        self.edges: dict[int, Edge] = {}
        self.num_blocks = 0
        self._next_number = 0

    def root(self, namespace: tuple[str, str], block_bytes: int) -> Edge:
        roots = self.roots.setdefault(namespace, {})
        if block_bytes not in roots:
            roots[block_bytes] = _Root(namespace, block_bytes)
        return roots[block_bytes]

    def walk(self, root: Edge, data: bytes) -> tuple[list[Edge], int]:
        """The edges that `data` runs through, and the number of common blocks."""
        path: list[Edge] = []
        edge, offset, size, end = root, 0, root.block_bytes, len(data)
        while True:
            child = edge.children.get(data[offset : offset + size])
            if child is None:
                return path, offset // size
            path.append(child)
            tokens = child.tokens
            if not data.startswith(tokens, offset):
                return path, offset // size + child.common_blocks(data, offset)
            edge = child
            offset += len(tokens)
            if offset >= end:
                return path, offset // size

    def find(self, position: int) -> tuple[Edge, int] | None:
        """The edge that holds a position, and the depth; None if it is gone."""
        edge, depth = self.edges[position >> 32], position & DEPTH
        while depth < edge.start:
            assert edge.parent is not None
            edge = edge.parent
        return (edge, depth) if depth < edge.end else None

    def release(self, number: int, count: int = 1) -> None:
        """`count` positions name that edge no longer."""
        edge = self.edges[number]
        edge.num_positions -= count
        if not edge.num_positions and edge.end == edge.start:
            del self.edges[number]

    def add_path(self, parent: Edge, data: bytes) -> Iterator[Edge]:
        """Yield new edges below `parent` for all blocks of `data`, first to last."""
        size = MAX_EDGE_BLOCKS * parent.block_bytes
        for offset in range(0, len(data), size):
            parent = self._add(parent, data[offset : offset + size])
            yield parent

    def _add(self, parent: Edge, tokens: bytes) -> Edge:
        edge = Edge(self._next_number, parent.block_bytes, parent, parent.end, tokens)
        self._next_number += 1
        self.edges[edge.number] = edge
        parent.children[edge.key] = edge
        self.num_blocks += edge.num_blocks
        return edge

    def room(self, edge: Edge, instance: int) -> int:
        """Blocks by which an edge may grow in place.

        Only a leaf that no other instance holds grows."""
        if edge.children or edge.parent is None or edge.device.is_held_by_others(instance):
            return 0
        if edge.lower is not None and edge.lower.is_held_by_others(instance):
            return 0
        return MAX_EDGE_BLOCKS - edge.num_blocks

    def extend(self, edge: Edge, data: bytes, instance: int, *, is_device: bool) -> None:
        """Append blocks, which `instance` holds, to a leaf that has room."""
        old, count = edge.num_blocks, len(data) // edge.block_bytes
        edge.tokens += data
        edge.end += count
        self.num_blocks += count
        mine, other = edge.holding(is_device=is_device), edge.lower if is_device else edge.device
        if other is not None and other.full:
            other.resize(old, old + count)
        if mine.full:
            return  # this instance alone, and it holds the new blocks too
        mine.add(instance, old, count, old + count)

    def split(self, edge: Edge, at: int) -> Edge:
        """Put the first `at` blocks of an edge into a new edge above it."""
        num_blocks, parent = edge.num_blocks, edge.parent
        assert parent is not None
        cut = at * edge.block_bytes
        key = edge.key
        head = Edge(self._next_number, edge.block_bytes, parent, edge.start, bytes(edge.tokens[:cut]))
        self._next_number += 1
        self.edges[head.number] = head
        head.device = edge.device.split(at, num_blocks)
        if edge.lower is not None:
            head.lower = edge.lower.split(at, num_blocks)
        del edge.tokens[:cut]
        edge.start += at
        edge.parent = head
        head.children[edge.key] = edge
        parent.children[key] = head
        return head

    def trim(self, edge: Edge) -> None:
        """Remove blocks without a holder at the end of a leaf.

        An edge above that becomes such a leaf is trimmed too."""
        while edge.parent is not None and not edge.children:
            num_blocks = edge.num_blocks
            kept = edge.device.length(num_blocks)
            if edge.lower is not None and kept < num_blocks:
                kept = max(kept, edge.lower.length(num_blocks))
            if kept == num_blocks:
                return
            self.num_blocks -= num_blocks - kept
            if kept:
                edge.end = edge.start + kept
                del edge.tokens[kept * edge.block_bytes :]
                for holding in (edge.device, edge.lower):
                    if holding is not None:
                        holding.resize(num_blocks, kept)
                return
            del edge.parent.children[edge.key]
            edge.end = edge.start
            edge.tokens.clear()
            if not edge.num_positions:
                del self.edges[edge.number]
            edge = edge.parent
        if isinstance(edge, _Root) and not edge.children:
            roots = self.roots[edge.namespace]
            del roots[edge.block_bytes]
            if not roots:
                del self.roots[edge.namespace]

    def check(self) -> None:
        """Raise `BookkeepingError` where edges, keys, counts or holders contradict each other."""
        seen = 0
        stack = [root for roots in self.roots.values() for root in roots.values()]
        while stack:
            edge = stack.pop()
            seen += edge.num_blocks
            if edge.parent is not None:
                _check_edge(edge, self.edges.get(edge.number))
            stack.extend(edge.children.values())
        for number, edge in self.edges.items():
            if edge.end == edge.start and not edge.num_positions:
                raise BookkeepingError(f"edge {number} is removed, and no position names it")
        if seen != self.num_blocks:
            raise BookkeepingError(f"the edges have {seen} blocks, the tree counts {self.num_blocks}")


def _check_edge(edge: Edge, registered: Edge | None) -> None:
    what, parent = f"edge {edge.number}", edge.parent
    assert parent is not None
    if registered is not edge:
        raise BookkeepingError(f"{what} is not registered under its number")
    if parent.children.get(edge.key) is not edge or edge.start != parent.end:
        raise BookkeepingError(f"{what} does not follow its parent")
    num_blocks = edge.num_blocks
    if not 1 <= num_blocks <= MAX_EDGE_BLOCKS or len(edge.tokens) != num_blocks * edge.block_bytes:
        raise BookkeepingError(f"{what} has {num_blocks} blocks and {len(edge.tokens)} bytes")
    length = 0
    for holding in (edge.device, edge.lower or edge.device):
        length = max(length, holding.length(num_blocks))
        for instance, bits in holding.partial.items():
            if holding.full >> instance & 1 or not 0 < bits < (1 << num_blocks) - 1:
                raise BookkeepingError(f"{what}: instance {instance} has bits {bits:b} of {num_blocks}")
    if not edge.children and length < num_blocks:
        raise BookkeepingError(f"{what}: the last blocks of a leaf have no holder")


def members(mask: int) -> list[int]:
    """The numbers of the bits that are set, ascending."""
    if mask.bit_count() > FEW_BITS:
        return [number for number, bit in enumerate(f"{mask:b}"[::-1]) if bit == "1"]
    numbers = []
    while mask:
        rest = mask & (mask - 1)
        numbers.append((mask ^ rest).bit_length() - 1)
        mask = rest
    return numbers


def num_leading(bits: int) -> int:
    """How many bits are set from bit 0 on without a gap."""
    return (~bits & (bits + 1)).bit_length() - 1


def leading_on_device(path: Sequence[Edge], end: int) -> Iterator[tuple[int, int]]:
    """Leading blocks of a path that instances have in device memory, at most `end`.

    Yields bitmasks of instances with that number; each instance is in one of them, or has none."""
    first = path[0].device
    alive = first.full
    for index in first.partial:
        alive |= 1 << index
    for edge in path:
        holding = edge.device
        dropped = alive & ~holding.full
        if dropped:
            alive ^= dropped
            for index, bits in holding.partial.items():
                if dropped >> index & 1 and bits & 1:
                    dropped ^= 1 << index
                    yield 1 << index, min(edge.start + num_leading(bits), end)
            if dropped and edge.start:
                yield dropped, edge.start
        if not alive:
            return
    yield alive, end


def leading_in_any(path: Sequence[Edge], end: int, alive: int) -> Iterator[tuple[int, int]]:
    """The same for blocks in any tier, of the instances in the bitmask `alive`."""
    for edge in path:
        lower = edge.lower
        full = edge.device.full | (lower.full if lower is not None else 0)
        for index in members(alive & ~full):
            bits = edge.device.partial.get(index, 0)
            if lower is not None:
                bits |= lower.partial.get(index, 0)
            leading = num_leading(bits)
            if leading < edge.num_blocks:
                alive ^= 1 << index
                yield 1 << index, min(edge.start + leading, end)
        if not alive:
            return
    yield alive, end
