"""Block events name the tier: what a router learns of host memory."""

from __future__ import annotations

from sagellm.control_plane.kv_events.codec import BlockRemoved, BlockStored, WireForm, from_wire, to_wire
from sagellm.core.blocks import Tier
from sagellm.core.events import BlocksRemoved, BlocksStored, Event, EventBus, IndexCleared
from sagellm.engines.simulator import TokenMemoryBackend
from tests.builders import fake_engine, request, run_all


def test_events_of_a_host_tier_carry_its_name() -> None:
    bus, seen = EventBus(), list[Event]()
    for kind in (BlocksStored, BlocksRemoved, IndexCleared):
        bus.subscribe(kind, seen.append)
    engine = fake_engine(TokenMemoryBackend(num_blocks=8), events=bus, host_blocks=6)
    for number in range(4):
        engine.add(request(str(number), [10 * number + i for i in range(12)], 1))
        run_all(engine)
    stored = {event.tier: 0 for event in seen if isinstance(event, BlocksStored)}
    removed = dict.fromkeys(stored, 0)
    for event in seen:
        if isinstance(event, BlocksStored):
            stored[event.tier] += len(event.hashes)
        elif isinstance(event, BlocksRemoved):
            removed[event.tier] += len(event.hashes)
    assert stored == {Tier.HBM: 12, Tier.DRAM: 12}
    assert removed[Tier.DRAM] == 6, "the tier has six slots"
    assert engine.kv.tiers is not None
    cached = [state.cached for state in engine.kv.tiers.states()]
    assert cached == [stored[Tier.DRAM] - removed[Tier.DRAM]]
    engine.kv.tiers.clear()
    assert not any(isinstance(event, IndexCleared) for event in seen), "the device is as it was"
    engine.close()


def test_the_wire_names_the_medium() -> None:
    form = WireForm(4)
    bus, seen = EventBus(), list[BlocksStored]()
    bus.subscribe(BlocksStored, seen.append)
    engine = fake_engine(events=bus, host_blocks=6)
    engine.add(request("a", range(9), 1))
    run_all(engine)
    wired = [to_wire(event, form) for event in seen]
    assert {event.medium for event in wired if isinstance(event, BlockStored)} == {"GPU", "CPU"}
    assert [from_wire(event).tier for event in wired] == [event.tier for event in seen]  # type: ignore[union-attr]
    read = {"CPU_PINNED": Tier.DRAM, "STORAGE": Tier.NVME, None: Tier.HBM, "new": Tier.REMOTE}
    for medium, tier in read.items():
        found = from_wire(BlockRemoved([b"x"], medium))
        assert isinstance(found, BlocksRemoved)
        assert found.tier is tier
    engine.close()
