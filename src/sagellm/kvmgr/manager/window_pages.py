"""`WindowPages`: attached pages of groups with one window, and what keeps them.

Each is kept for the last window before an end; `page_groups` says which ends there are.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sagellm.core.blocks import cdiv
from sagellm.core.errors import BookkeepingError
from sagellm.core.types import BlockIds, Window, first_seen, width

ENDS_PER_PATH = 3


@dataclass(slots=True)
class PrefixEnd:
    """Where a request's prefix ended: the leading blocks of the last window before it.

    Ends are a forest, named by their last leading blocks: `previous` is the one before this on its path,
    `longer` are those of which this is the previous. `num_ways`: in how many ways requests went on from here.
    `was_used`: a later request came to this end, or to one behind it.
    """

    leads: BlockIds
    previous: int | None
    num_ways: int = 0
    longer: dict[int, None] = field(default_factory=dict)
    was_used: bool = False


class WindowPages:
    """Pages of all groups with one window, by leading block.

    With `window` None the groups see all tokens, as the leading one does; then pages only come and go with
    their leading blocks.
    """

    def __init__(self, window: Window | None, num_groups: int, block_size: int) -> None:
        self.window, self.num_groups, self._block_size = window, num_groups, block_size
        self.attached: dict[int, BlockIds] = {}
        self._needed: Counter[int] = Counter()
        self._ends: dict[int, PrefixEnd] = {}
        self._ends_over: Counter[int] = Counter()
        self._behind: dict[int, None] = {}
        self._kept: dict[int, None] = {}

    @property
    def window_blocks(self) -> int:
        """Blocks that a window reaches into at most."""
        assert self.window is not None
        return cdiv(width(self.window) - 1, self._block_size) + 1

    @property
    def num_unneeded(self) -> int:
        """Leading blocks with pages that no running request needs."""
        return len(self._behind) + len(self._kept)

    def first_needed(self, num_tokens: int) -> int:
        """The first block that a token behind `num_tokens` computed ones attends to."""
        return first_seen(self.window, num_tokens) // self._block_size

    def num_to_need(self, leads: Iterable[int]) -> int:
        """How many of these leading blocks no running request needs yet."""
        return sum(lead not in self._needed for lead in leads)

    def is_needed_once(self, lead: int) -> bool:
        """Whether a single running request needs the pages of this block."""
        return self._needed[lead] == 1

    def need(self, leads: Iterable[int]) -> None:
        """A running request's window covers these."""
        for lead in leads if self.window is not None else ():
            self._needed[lead] += 1
            self._behind.pop(lead, None)
            self._kept.pop(lead, None)

    def pass_by(self, leads: Iterable[int]) -> None:
        """It covers them no longer."""
        for lead in leads if self.window is not None else ():
            self._needed[lead] -= 1
            if not self._needed[lead]:
                del self._needed[lead]
                self._place(lead)

    def attach(self, lead: int, pages: BlockIds) -> None:
        """Attach the pages of these tokens to a block of the index."""
        self.attached[lead] = pages
        self._place(lead)

    def has_end(self, lead: int) -> bool:
        """Whether a prefix ended with this leading block."""
        return lead in self._ends

    def use_end(self, last: int | None) -> None:
        """A request comes to this end: its branch is not abandoned."""
        while last is not None and not self._ends[last].was_used:
            self._ends[last].was_used = True
            last = self._ends[last].previous

    def add_end(self, leads: Sequence[int], previous: int | None, *, on_path: bool) -> int | None:
        """A prefix ends with these leading blocks. Its last window is kept, if it is whole.

        `previous` is the end before it on the path. `on_path`: other requests' blocks go on from here.
        Returns where the new one stands.
        """
        last = leads[-1]
        if last in self._ends:
            if on_path and last != previous:
                self.use_end(last)
            return last
        tail = leads[self.first_needed(len(leads) * self._block_size) :]
        if self.window is None or any(lead not in self.attached for lead in tail):
            return previous
        if previous is not None and previous not in self._ends:  # it was given up meanwhile
            previous = next(filter(self.has_end, reversed(leads)), None)
        self._ends[last] = PrefixEnd(array("i", tail), previous, int(on_path))
        for lead in tail:
            self._ends_over[lead] += 1
            if lead in self._behind:
                del self._behind[lead]
                self._kept[lead] = None
        if previous is not None:
            self._link(last, previous, on_path=on_path)
        self._forget_old_ends(last)
        return last

    def evicted(self, leads: Iterable[int]) -> BlockIds:
        """These blocks have left the index; returns their pages."""
        gone = array("i")
        for lead in leads:
            if lead in self._ends:
                self._remove_end(lead)
            self._behind.pop(lead, None)
            self._kept.pop(lead, None)
            gone += self.attached.pop(lead, array("i"))
        return gone

    def shed(self, num_pages: int, *, kept: bool = False) -> BlockIds:
        """Detach at least so many pages that are behind, or `kept`. All, if there are fewer."""
        queue, gone = self._kept if kept else self._behind, array("i")
        while queue and len(gone) < num_pages:
            lead = next(iter(queue))
            del queue[lead]
            gone += self.attached.pop(lead)
        return gone

    def remap(self, moves: Mapping[int, int]) -> None:
        """After a compaction: block `source` is now block `target`."""

        def moved(block: int) -> int:
            return moves.get(block, block)

        self.attached = {moved(lead): array("i", map(moved, pages)) for lead, pages in self.attached.items()}
        self._needed = Counter({moved(lead): count for lead, count in self._needed.items()})
        self._ends_over = Counter({moved(lead): count for lead, count in self._ends_over.items()})
        self._behind = dict.fromkeys(map(moved, self._behind))
        self._kept = dict.fromkeys(map(moved, self._kept))
        self._ends = {moved(last): end for last, end in self._ends.items()}
        for end in self._ends.values():
            end.leads = array("i", map(moved, end.leads))
            end.previous = None if end.previous is None else moved(end.previous)
            end.longer = dict.fromkeys(map(moved, end.longer))

    def check(self, needed: Counter[int], indexed: set[int]) -> None:
        """Raise `BookkeepingError` unless every attached page is in the state that its holders imply."""
        strangers = self.attached.keys() - indexed
        if strangers or not indexed.issuperset(self._ends):
            raise BookkeepingError(f"pages are attached to {sorted(strangers)}, which the index has not")
        for last, end in self._ends.items():
            before = None if end.previous is None else self._ends[end.previous]
            if before is not None and (last not in before.longer or before.was_used < end.was_used):
                raise BookkeepingError(f"the end at block {last} and the one before it disagree")
            if any(self._ends[longer].previous != last for longer in end.longer):
                raise BookkeepingError(f"the end at block {last} and those behind it disagree")
        if self.window is None:
            if self.attached.keys() != indexed:
                raise BookkeepingError(f"blocks {sorted(indexed - self.attached.keys())} lack pages")
            return
        over = Counter(lead for end in self._ends.values() for lead in end.leads)
        if needed != self._needed or over != self._ends_over:
            raise BookkeepingError("the windows of requests or of ended prefixes are counted wrong")
        free = self.attached.keys() - needed.keys()
        if self._kept.keys() != free & over.keys() or self._behind.keys() != free - over.keys():
            raise BookkeepingError("pages are kept that no prefix needs, or the other way round")
        if not needed.keys() <= self.attached.keys():
            raise BookkeepingError(f"{sorted(needed.keys() - self.attached.keys())} are needed and gone")

    def _place(self, lead: int) -> None:
        if self.window is not None and lead in self.attached and lead not in self._needed:
            (self._kept if lead in self._ends_over else self._behind)[lead] = None

    def _link(self, last: int, previous: int, *, on_path: bool) -> None:
        """A new end follows `previous`. Ends on the same way that lie behind the new one follow it."""
        new, end = self._ends[last], self._ends[previous]
        if not on_path:
            end.num_ways += 1
        elif end.num_ways == 1:
            new.longer, end.longer = end.longer, {}
            new.was_used = any(self._ends[other].was_used for other in new.longer)
            for other in new.longer:
                self._ends[other].previous = last
        end.longer[last] = None

    def _forget_old_ends(self, last: int) -> None:
        """Keep the last ends and two-way junctions, and all of more ways.

        With an end go the branches from it to which no request came back.
        """
        on_path: set[int] = set()
        found: int | None = last
        num_junctions = 0
        while found is not None:
            end = self._ends[found]
            is_junction = end.num_ways == 2
            num_junctions += is_junction
            on_path.add(found)
            stays = end.num_ways > 2 or (is_junction and num_junctions <= ENDS_PER_PATH)
            if len(on_path) > ENDS_PER_PATH and not stays:
                for other in end.longer.keys() - on_path:
                    if not self._ends[other].was_used:
                        self._remove_branch(other)
                self._remove_end(found)
            found = end.previous

    def _remove_branch(self, last: int) -> None:
        branch = [last]
        for end in branch:
            branch += self._ends[end].longer
        for end in reversed(branch):
            self._remove_end(end)

    def _remove_end(self, last: int) -> None:
        end = self._ends.pop(last)
        for longer in end.longer:
            self._ends[longer].previous = end.previous
        if end.previous is not None:
            before = self._ends[end.previous]
            del before.longer[last]
            before.longer |= end.longer
        for lead in end.leads:
            self._ends_over[lead] -= 1
            if not self._ends_over[lead]:
                del self._ends_over[lead]
                if lead in self._kept:
                    del self._kept[lead]
                    self._behind[lead] = None
