"""The network to an instance is cut and heals. Needs root: `pytest -m root`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import expected_tokens, request
from tests.control_plane.fleet.scene import Scene, is_done
from tests.cut_network import ROOT, CutNetwork

pytestmark = pytest.mark.root
PROMPT = list(range(1, 30))
LEASE_S = 1.5
PEER = """
import sys, time
from sagellm.control_plane.fleet.instance_server import InstanceServer
from sagellm.core.clock import MonotonicClock
from sagellm.core.events import EventBus
from sagellm.engines.simulator.token_memory import TokenMemoryBackend
from tests.builders import fake_engine
from tests.control_plane.fleet.scene import KEY
events, clock = EventBus(), MonotonicClock()
engine = fake_engine(TokenMemoryBackend(num_blocks=1200, max_model_len=4096), events=events, clock=clock)
server = InstanceServer("far", engine, "tcp://10.123.78.2:5701", KEY, max_model_len=4096, events=events)
print("ready", flush=True)
while True:
    server.turn()
    time.sleep(0.002)
    stats = engine.stats()
    print(stats.num_running + stats.num_waiting, stats.blocks_active, flush=True)
"""


@pytest.fixture
def network() -> Iterator[CutNetwork]:
    with CutNetwork("10.123.78.1", "10.123.78.2").made() as made:
        yield made


def test_a_cut_and_what_follows_it(tmp_path: Path, network: CutNetwork) -> None:
    """Requests go on elsewhere, the instance drops them after its lease, and serves again once healed."""
    output = (tmp_path / "far.out").open("w+")
    command = network.command(sys.executable, "-c", PEER)
    with subprocess.Popen(command, stdout=output, env=network.environment, cwd=ROOT) as peer:
        scene = Scene(tmp_path, 1, lease_s=LEASE_S)
        try:
            scene.front.know(scene.instances.add("far", "tcp://10.123.78.2:5701"))
            scene.until(lambda: scene.front.members["far"].load is not None)
            for number in range(6):
                scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 400))
            scene.until(lambda: all(len(scene.tokens.get(f"r{n}", ())) > 3 for n in range(6)))
            assert "far" in scene.router.placed
            began_s = scene.clock.now()
            network.cut()
            scene.until(lambda: scene.front.members["far"].facts is None)
            assert scene.clock.now() - began_s < 5.0
            scene.finish()
            for number in range(6):
                expected = expected_tokens(scene.backends["i-0"], [number + 1, *PROMPT], 400)
                assert scene.tokens[f"r{number}"] == expected
                assert is_done(scene.ended[f"r{number}"])
            until_s = scene.clock.now() + LEASE_S + 1.0
            while scene.clock.now() < until_s:
                scene.turn()
            output.flush()
            assert (tmp_path / "far.out").read_text().splitlines()[-1] == "0 0"
            network.heal()
            scene.until(lambda: scene.front.members["far"].load is not None)
            scene.front.drain("i-0")
            scene.front.add(request("again", PROMPT, 5))
            scene.finish()
            assert scene.tokens["again"] == expected_tokens(scene.backends["i-0"], PROMPT, 5)
        finally:
            peer.kill()
            scene.close()
            output.close()
