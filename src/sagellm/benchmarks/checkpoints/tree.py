"""The prefix tree of a trace, in segments that requests use whole."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from sagellm.benchmarks.replay.block_trace import BlockTrace
from sagellm.core.types import Namespace


@dataclass(slots=True, eq=False)
class Segment:
    """Blocks `[start, stop)` of a path, and what a cache holds of them.

    `first_key`: the key of its first block; those of the others follow. A block's key stands for the whole
    prefix that ends with it. Blocks before `resident` are in the cache. `depths`: of checkpoints, ascending;
    one at depth d is behind d blocks, start < d <= stop. `num_holders`: checkpoints here, and child segments
    with any below. `is_known`: a request has computed it.
    """

    parent: Segment | None
    start: int
    stop: int
    first_key: int
    resident: int = 0
    depths: list[int] = field(default_factory=list)
    num_holders: int = 0
    num_resident_children: int = 0
    is_known: bool = False
    last_use: int = 0

    def key(self, depth: int) -> int:
        """The key of the prefix of `depth` blocks, which ends in this segment."""
        return self.first_key + depth - self.start - 1


@dataclass(slots=True, eq=False)
class Path:
    """The full blocks of a prompt without its last token, which is always computed."""

    segments: list[Segment]

    @property
    def num_blocks(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    def at(self, depth: int) -> Segment:
        """The segment in which the prefix of `depth` > 0 blocks ends."""
        return self.segments[bisect_left(self.segments, depth, key=lambda segment: segment.stop)]

    def keys(self) -> array[int]:
        """The key of each block."""
        keys = array("q")
        for segment in self.segments:
            keys.extend(range(segment.first_key, segment.first_key + segment.stop - segment.start))
        return keys


def paths(trace: BlockTrace) -> list[Path]:
    """Returns the path of each request in a fresh tree. The tree is cut wherever a prompt of the trace ends
    or leaves another: a representation that policies do not see."""
    prompts = [_prompt(trace, number) for number in range(len(trace.requests))]
    namespaces = [request.namespace for request in trace.requests]
    matched, cuts = _cuts(prompts, namespaces)
    ends: defaultdict[Namespace, dict[int, Segment]] = defaultdict(dict)
    found, next_key = [], 0
    for prompt, namespace, start in zip(prompts, namespaces, matched, strict=True):
        by_end = ends[namespace]
        segments = _chain(by_end[prompt[start - 1]]) if start else []
        stops = [d for d in range(start + 1, len(prompt)) if prompt[d - 1] in cuts[namespace]]
        for stop in (*stops, len(prompt)):
            if stop > start:
                parent = segments[-1] if segments else None
                segments.append(Segment(parent, start, stop, next_key, start))
                by_end[prompt[stop - 1]] = segments[-1]
                next_key += stop - start
                start = stop
        found.append(Path(segments))
    return found


def _prompt(trace: BlockTrace, number: int) -> Sequence[int]:
    request = trace.requests[number]
    return request.ids.slice(0, max(0, request.num_input_tokens - 1) // trace.block_tokens)


def _cuts(
    prompts: Sequence[Sequence[int]], namespaces: Sequence[Namespace]
) -> tuple[list[int], dict[Namespace, set[int]]]:
    """Returns how many leading blocks of each prompt came before, and all cuts.

    A cut is a block behind which a prompt of the trace ends or leaves another.
    """
    seen: defaultdict[Namespace, set[int]] = defaultdict(set)
    cuts: defaultdict[Namespace, set[int]] = defaultdict(set)
    matched = []
    for prompt, namespace in zip(prompts, namespaces, strict=True):
        known = seen[namespace]
        # blocks of a prefix that came before are all known, those behind it all new
        length = bisect_left(range(len(prompt)), True, key=lambda place: prompt[place] not in known)
        matched.append(length)
        known.update(prompt[length:])
        cuts[namespace].update(prompt[max(0, length - 1) : length], prompt[-1:])
    return matched, cuts


def _chain(segment: Segment | None) -> list[Segment]:
    chain = []
    while segment is not None:
        chain.append(segment)
        segment = segment.parent
    return chain[::-1]
