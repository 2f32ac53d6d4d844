"""What a channel says of transfers to its instance, while they are under way."""

from __future__ import annotations

from sagellm.core.clock import ManualClock
from tests.comm.kv_transfer.faulty import OPTIONS, FaultyNetwork, FaultyTransport
from tests.comm.kv_transfer.world import SIZE, Inline, Instance, introduce, prompt


def test_what_is_under_way() -> None:
    clock, network = ManualClock(), FaultyNetwork(0, 0.0)
    source, target = (
        Instance(name, FaultyTransport(name, network), options=OPTIONS, clock=clock, worker=Inline())
        for name in "ab"
    )
    introduce(source, target)
    tokens = prompt(1, 6)
    source.compute(tokens)
    assert not target.channel.incoming()
    ticket = source.send(tokens, "b", "r", b"note", by_layer=True)
    network.run_all()
    [offered] = target.channel.incoming()
    assert (offered.request_id, offered.source, offered.note) == ("r", "a", b"note")
    assert (offered.has_blocks, offered.num_chunks, offered.num_layers) == (False, 0, 0)
    for num_layers in range(4):
        clock.advance(0.1)
        source.channel.computed(ticket, num_layers)
        for _ in range(9):
            network.run_all()
            source.poll()
            if num_layers < 3:
                target.poll()
        [coming] = target.channel.incoming()
        assert (coming.has_blocks, coming.num_layers) == (True, num_layers)
        assert coming.sign_s == clock.now()
    target.poll()
    assert not target.channel.incoming()
    assert target.num_tokens(tokens) == 6 * SIZE
