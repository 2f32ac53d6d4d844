"""A network interface goes down in the middle of a transfer. Needs root: `pytest -m root`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports.tcp import TcpTransport
from sagellm.core.protocols.kv_transfer import TransferStatus
from tests.comm.kv_transfer.world import KEY, SIZE, Instance, finish, prompt, until
from tests.cut_network import ROOT, CutNetwork

pytestmark = pytest.mark.root
BLOCKS = 400
OPTIONS = ChannelOptions(
    chunk_bytes=3000, credits=2, stall_s=1.0, offer_wait_s=0.5, backoff_s=0.05, num_retries=1
)
PEER = """
import sys
from sagellm.comm.kv_transfer.transports.tcp import TcpTransport
from tests.comm.kv_transfer.test_cut_network import KEY, OPTIONS, Instance, prompt
me = Instance("peer", TcpTransport(KEY, host="10.123.77.2", port=0), num_blocks=512, options=OPTIONS)
print(me.channel.metadata().decode(), flush=True)
while True:
    me.poll()
    me.channel.wait(0.01)
"""


@pytest.fixture
def network() -> Iterator[CutNetwork]:
    with CutNetwork("10.123.77.1", "10.123.77.2").made() as made:
        yield made


def test_a_cut_and_what_follows_it(network: CutNetwork) -> None:
    """The transfer is reported as failed in time; once the network is back, only the rest is sent."""
    me = Instance("test", TcpTransport(KEY, host="10.123.77.1", port=0), num_blocks=512, options=OPTIONS)
    command = network.command(sys.executable, "-c", PEER)
    peer = subprocess.Popen(command, stdout=subprocess.PIPE, env=network.environment, cwd=ROOT)
    try:
        assert peer.stdout is not None
        me.channel.add_peer(peer.stdout.readline())
        tokens = prompt(1, BLOCKS)
        me.compute(tokens)
        ticket = me.send(tokens, "peer")
        until(lambda: me.channel._sender._transfers[ticket.transfer_id].num_bytes > 100_000, me)
        network.cut()
        report = finish(me, ticket)
        assert report.status is TransferStatus.RETRY
        network.heal()
        for _ in range(20):
            again = finish(me, me.send(tokens, "peer"))
            if again.status is TransferStatus.DONE:
                break
        assert (again.status, again.num_tokens) == (TransferStatus.DONE, BLOCKS * SIZE)
        assert again.num_bytes < BLOCKS * me.layout.bytes_per_block
        me.check(tokens)
    finally:
        peer.kill()
        peer.communicate()
        me.channel.close()
