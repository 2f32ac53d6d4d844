"""A prompt goes to another engine layer by layer, while it is computed in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sagellm.comm.kv_transfer import blocks
from sagellm.comm.kv_transfer.channel import TransferChannel
from sagellm.comm.kv_transfer.messages import ChunkHead
from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports._slots import SlotTransport
from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork, InProcessTransport
from sagellm.core.errors import RequestError
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.protocols.kv_transfer import Message, Ticket, TransferStatus
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build_transfers import build_transfers
from tests.comm.kv_transfer.fabrics import transport
from tests.engines.native.tiered import BLOCK, WHOLE, ask, engine, kv_of, prompts
from tests.tiny_models import save_tiny

LAYERS, LAYER_BYTES = 3, 4096
"""Of the tiny model: bytes of a layer in a block."""
CHUNKED = {"scheduler.max_batched_tokens": 16, "scheduler.max_num_seqs": 4, "kv.num_blocks": 40}
OPTIONS = ChannelOptions(chunk_bytes=LAYER_BYTES)
DONE, CANCELLED = TransferStatus.DONE, TransferStatus.CANCELLED


class Event(NamedTuple):
    """`computed`, or `sent`: so many layers of the blocks before `stop`."""

    name: str
    num_layers: int
    stop: int


class NotingTransport(InProcessTransport):
    """Notes which chunks leave."""

    log: list[Event]
    channel: TransferChannel

    def post(self, link: int, message: Message) -> None:
        if message.is_chunk:
            head = ChunkHead.unpack(message.head)
            transfer = self.channel._sender._transfers[head.transfer]
            assert transfer.accept is not None
            for chunk in transfer.plan[head.numbers.start : head.numbers.stop]:
                self.log.append(Event("sent", chunk.num_layers, transfer.accept.first + chunk.stop))
        super().post(link, message)


class Scene:
    """A prefill and a decode engine on a network that delivers when a layer is computed, and when told to."""

    def __init__(self, folder: Path, stack: ExitStack, **settings: Any) -> None:
        self.network, self.log = InProcessNetwork(threaded=False), list[Event]()
        noting = NotingTransport("prefill", self.network)
        made = []
        for node, each in (("prefill", noting), ("decode", InProcessTransport("decode", self.network))):
            asked = engine(folder, **(CHUNKED | settings))
            stack.callback(asked.close)
            made.append(build_transfers(asked, node, each, options=OPTIONS))
            stack.callback(made[-1].close)
        self.source, self.target = made
        self.source.channel.add_peer(self.target.channel.metadata())
        assert isinstance(self.source.channel, TransferChannel)
        noting.log, noting.channel = self.log, self.source.channel
        self.computed = self.source.channel.computed
        self.source.channel.computed = self.note  # type: ignore[method-assign]
        self.received: list[Any] = []

    def note(self, ticket: Ticket, num_layers: int, num_blocks: int | None = None) -> None:
        assert num_blocks is not None
        self.log.append(Event("computed", num_layers, num_blocks))
        self.computed(ticket, num_layers, num_blocks)
        while self.network.run_one():
            pass

    def add(self, name: str, prompt: list[int], max_tokens: int = 1) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.source.engine.add(Request(name, Tokens(prompt), params))

    def send(self, name: str, *, is_accepted: bool = True) -> Ticket:
        """Offer the prompt of a request, and have the target make room for it."""
        ticket = self.source.send_prefill(name, "decode", b"a note")
        assert isinstance(self.source.channel, TransferChannel)
        transfers = self.source.channel._sender._transfers
        self.until(lambda: not is_accepted or transfers[ticket.transfer_id].accept is not None)
        return ticket

    def until(self, condition: Callable[[], object]) -> None:
        for _ in range(3000):
            while self.network.run_one():
                pass
            self.source.poll()
            self.received += self.target.poll()
            if condition():
                return
            self.target.channel.wait(0.001)
        raise AssertionError("it takes too long")

    def run(self) -> None:
        while self.source.engine.has_work():
            self.source.engine.step()
            self.source.poll()
            self.received += self.target.poll()
            self.check()

    def end(self, ticket: Ticket) -> TransferStatus:
        self.until(lambda: self.source.reports)
        [report] = self.source.reports
        self.source.reports.clear()
        assert report.ticket == ticket
        self.until(lambda: report.status is CANCELLED or self.received)
        assert self.source.engine.kv.pool.num_kept == 0
        self.check()
        return report.status

    def check(self) -> None:
        for each in (self.source, self.target):
            each.engine.check()
            each.channel.check()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama")
    return folder


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def check_order(log: list[Event]) -> None:
    """Nothing leaves before it is computed, and much before the last layer is."""
    frontier = [0] * LAYERS
    for event in log:
        if event.name == "computed":
            frontier[: event.num_layers] = [max(event.stop, was) for was in frontier[: event.num_layers]]
        else:
            assert event.stop <= frontier[event.num_layers - 1], event


def index_of(log: list[Event], event: Event) -> int:
    return next(i for i, each in enumerate(log) if each == event)


@pytest.mark.parametrize("overlap", [False, True])
def test_layers_leave_while_the_prompt_is_computed(overlap: bool, model: Path, stack: ExitStack) -> None:
    scene = Scene(model, stack, **{"engine.overlap": overlap})
    [prompt] = prompts(count=1)
    scene.add("p", prompt, max_tokens=6)
    ticket = scene.send("p")
    scene.run()
    assert scene.end(ticket) is DONE
    log, num_blocks = scene.log, WHOLE // BLOCK
    check_order(log)
    first_chunk, whole = 16 // BLOCK, Event("computed", LAYERS, num_blocks)
    for layer in range(1, LAYERS + 1):
        for stop in range(1, num_blocks + 1):
            assert Event("sent", layer, stop) in log
    assert index_of(log, Event("sent", 1, 1)) < index_of(log, Event("computed", LAYERS, first_chunk))
    assert index_of(log, Event("sent", 2, num_blocks)) < index_of(log, whole), "within the last chunk"
    assert index_of(log, Event("sent", LAYERS, first_chunk)) < index_of(log, Event("sent", 1, num_blocks))
    [received] = scene.received
    assert (received.num_tokens, received.note) == (WHOLE, b"a note")
    here, there = kv_of(scene.source.engine, prompt), kv_of(scene.target.engine, prompt)
    assert torch.equal(here, there)
    alone = engine(model, **CHUNKED)
    stack.callback(alone.close)
    expected, _ = ask(alone, "alone", prompt)
    assert torch.equal(kv_of(alone, prompt), there)
    assert ask(scene.target.engine, "d", prompt) == (expected, WHOLE)


def test_it_brings_what_a_transfer_of_the_whole_brings(model: Path, stack: ExitStack) -> None:
    by_layer, whole = (Scene(model, stack) for _ in range(2))
    [prompt] = prompts(count=1)
    by_layer.add("p", prompt)
    ticket = by_layer.send("p")
    by_layer.run()
    assert by_layer.end(ticket) is DONE
    whole.add("p", prompt)
    whole.run()
    assert whole.end(whole.source.send("p", Tokens(prompt), "decode")) is DONE
    assert torch.equal(kv_of(by_layer.target.engine, prompt), kv_of(whole.target.engine, prompt))


@pytest.mark.parametrize("kind", ["shared_memory", "shared blocks", "tcp"])
@pytest.mark.parametrize("overlap", [False, True])
def test_over_a_real_transport(
    kind: str, overlap: bool, model: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, is_shared = [], kind == "shared blocks"
    if is_shared:
        kind = "shared_memory"
        monkeypatch.setattr(blocks, "_SMALL_BYTES", 0)
        monkeypatch.setattr(SlotTransport, "reserve", lambda *given, **named: pytest.fail("a slot is used"))
    for node in ("prefill", "decode"):
        asked = engine(model, **CHUNKED, **{"engine.overlap": overlap, "kv.share_pool": is_shared})
        stack.callback(asked.close)
        made.append(build_transfers(asked, node, transport(kind), options=OPTIONS))
        stack.callback(made[-1].close)
    source, target = made
    source.channel.add_peer(target.channel.metadata())
    for number, prompt in enumerate(prompts(seed=3, count=4)):
        params = SamplingParams(max_tokens=1 + 3 * number, temperature=0.0, ignore_eos=True)
        source.engine.add(Request(f"p{number}", Tokens(prompt), params))
        source.send_prefill(f"p{number}", "decode")
        received: list[Any] = []
        while source.engine.has_work():
            source.engine.step()
            source.poll()
            received += target.poll()
        for _ in range(3000):
            source.poll()
            received += target.poll()
            if source.reports and received:
                break
            target.channel.wait(0.002)
        assert [report.status for report in source.reports] == [DONE]
        source.reports.clear()
        assert [one.num_tokens for one in received] == [WHOLE]
        assert torch.equal(kv_of(source.engine, prompt), kv_of(target.engine, prompt))
        assert source.engine.kv.pool.num_kept == 0
        for each in (source, target):
            each.engine.check()
            each.channel.check()


def test_a_request_that_runs_already_is_sent_from_where_it_stands(model: Path, stack: ExitStack) -> None:
    scene = Scene(model, stack)
    [prompt] = prompts(count=1)
    scene.add("p", prompt)
    for _ in range(2):
        scene.source.engine.step()
    ticket = scene.send("p")
    with pytest.raises(RequestError, match="is being sent"):
        scene.source.send_prefill("p", "decode")
    with pytest.raises(RequestError, match="add it first"):
        scene.source.send_prefill("nobody", "decode")
    scene.run()
    assert scene.end(ticket) is DONE
    check_order(scene.log)
    assert torch.equal(kv_of(scene.source.engine, prompt), kv_of(scene.target.engine, prompt))


def test_a_prefix_that_is_cached_is_not_sent_again(model: Path, stack: ExitStack) -> None:
    """Neither here, where it is not computed, nor there, where it is not sent."""
    scene = Scene(model, stack)
    first, second = prompts(count=2)
    second = first[:32] + second[32:]
    for number, prompt in enumerate((first, second)):
        scene.add(f"p{number}", prompt)
        ticket = scene.send(f"p{number}")
        scene.log.clear()
        scene.received.clear()
        scene.run()
        assert scene.end(ticket) is DONE
        check_order(scene.log)
    assert min(event.stop for event in scene.log if event.name == "sent") > 32 // BLOCK
    assert torch.equal(kv_of(scene.source.engine, second), kv_of(scene.target.engine, second))


def test_two_requests_with_one_prompt(model: Path, stack: ExitStack) -> None:
    """The second gives its blocks up for those of the first while they are sent: they are nobody's then."""
    scene = Scene(model, stack, **{"scheduler.max_batched_tokens": 32})
    [prompt] = prompts(count=1)
    for name in "pq":
        scene.add(name, prompt)
    network = scene.network
    ticket = scene.send("q")
    right = network.run_one
    network.run_one = lambda: False  # type: ignore[method-assign]
    scene.run()
    pool = scene.source.engine.kv.pool
    assert pool.num_kept
    others = prompts(seed=5, count=3)
    for number, other in enumerate(others):
        ask(scene.source.engine, f"o{number}", other)
    network.run_one = right  # type: ignore[method-assign]
    assert scene.end(ticket) is DONE
    alone = engine(model, **CHUNKED)
    stack.callback(alone.close)
    ask(alone, "alone", prompt)
    there = kv_of(scene.target.engine, prompt)
    assert torch.allclose(kv_of(alone, prompt), there, atol=1e-5)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_an_aborted_request_cancels_its_transfer(num_steps: int, model: Path, stack: ExitStack) -> None:
    scene = Scene(model, stack)
    [prompt] = prompts(count=1)
    scene.add("p", prompt)
    ticket = scene.send("p")
    for _ in range(num_steps):
        scene.source.engine.step()
    scene.source.engine.abort("p")
    assert scene.end(ticket) is CANCELLED
    scene.until(lambda: scene.received)
    [received] = scene.received
    assert received.status is CANCELLED
    assert received.num_tokens == num_steps * 16, "whole blocks of steps that were committed"


def test_a_step_that_fails_cancels_its_transfers(
    model: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails in its second layer: nothing of it becomes whole at the target."""
    scene = Scene(model, stack)
    [prompt] = prompts(count=1)
    scene.add("p", prompt)
    ticket = scene.send("p")
    scene.source.engine.step()
    backend: Any = scene.source.engine.backend
    right = backend.execute_by_layer

    def fails(plan: ExecutionPlan, on_layer: Callable[[int], None]) -> StepResult:
        def fail(num_layers: int) -> None:
            on_layer(num_layers)
            if num_layers == 2:
                raise RuntimeError("a fault")

        result: StepResult = right(plan, fail)
        return result

    monkeypatch.setattr(backend, "execute_by_layer", fails)
    scene.source.engine.step()
    monkeypatch.undo()
    assert Event("sent", 2, 8) in scene.log, "some had left"
    scene.run()
    assert scene.end(ticket) is CANCELLED
    scene.until(lambda: scene.received)
    assert [each.num_tokens for each in scene.received] == [16]
    scene.received.clear()
    scene.add("again", prompt)
    ticket = scene.send("again")
    scene.run()
    assert scene.end(ticket) is DONE
    assert torch.equal(kv_of(scene.source.engine, prompt), kv_of(scene.target.engine, prompt))


def test_without_a_transfer_nothing_is_said_of_layers(
    model: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor of steps that compute other prompts only, nor of decode steps, which may be recorded."""
    scene = Scene(model, stack)
    backend: Any = scene.source.engine.backend
    calls = []
    right = backend.execute_by_layer

    def counted(plan: ExecutionPlan, on_layer: Callable[[int], None]) -> StepResult:
        calls.append(plan)
        result: StepResult = right(plan, on_layer)
        return result

    monkeypatch.setattr(backend, "execute_by_layer", counted)
    first, second = prompts(count=2)
    ask(scene.source.engine, "other", first)
    assert not calls
    scene.add("p", second, max_tokens=4)
    ticket = scene.send("p")
    scene.run()
    assert scene.end(ticket) is DONE
    assert len(calls) == 4, "the chunks of one prompt"
    assert all(plan.prefills for plan in calls)


def test_a_target_that_refuses(model: Path, stack: ExitStack) -> None:
    """The blocks are free again, and the prompt is computed to its end."""
    scene = Scene(model, stack)
    other = engine(model, **(CHUNKED | {"kv.block_size": 8}))
    stack.callback(other.close)
    refusing = build_transfers(other, "other", InProcessTransport("other", scene.network))
    stack.callback(refusing.close)
    scene.source.channel.add_peer(refusing.channel.metadata())
    [prompt] = prompts(count=1)
    scene.add("p", prompt)
    scene.source.send_prefill("p", "other")
    scene.run()
    scene.until(lambda: scene.source.reports)
    assert [report.status for report in scene.source.reports] == [TransferStatus.REFUSED]
    assert scene.source.engine.kv.pool.num_kept == 0
    scene.check()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_request_waits_for_blocks_that_are_read(is_aborted: bool, model: Path, stack: ExitStack) -> None:
    """It needs more blocks than are free, alone in the batch, and does not end for lack of memory."""
    scene = Scene(model, stack, **{"kv.num_blocks": 20})
    first, second = prompts(count=2)
    scene.add("p", first)
    ticket, right = scene.send("p"), scene.network.run_one
    scene.network.run_one = lambda: False  # type: ignore[method-assign]
    asked = scene.source.engine
    if is_aborted:
        for _ in range(3):
            asked.step()
        asked.abort("p")
        assert asked.kv.pool.num_kept
    else:
        scene.run()
        assert asked.kv.pins.num_sent == 1
    scene.add("q", second)
    for _ in range(8):
        outputs = list(asked.step())
        assert not outputs, outputs
        scene.check()
    scene.network.run_one = right  # type: ignore[method-assign]
    assert scene.end(ticket) is (CANCELLED if is_aborted else DONE)
    [output] = [each for _ in range(8) for each in asked.step()]
    assert (output.request_id, output.error) == ("q", None)
