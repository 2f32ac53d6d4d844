"""Draft heads: the head against its plain twin, proposals by every way a step takes, unchanged outputs."""

from __future__ import annotations

import random
from argparse import Namespace
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import load_file, save_file

from demo_head import AnyHead, DemoHead, load_head
from demo_net import load_net
from demo_text import Row
from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.core.blocks import NO_PAGE
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, ModelError, WeightShapeError
from sagellm.core.plan import ExecutionPlan
from sagellm.core.types import CapabilityDescriptor, SamplingParams
from sagellm.engines.build import build_backend, build_engine, load
from sagellm.engines.build_speculation import build_speculation
from sagellm.engines.native import DEMO_MODEL, head_drafter
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.head_draft import MOST_TOKENS
from sagellm.engines.native.head_files import HEAD_FILE, HEAD_KIND, TRAINED_FOR, HeadKind, head_mark
from sagellm.engines.native.headed_backend import HeadedBackend
from tests.effort import examples
from tests.engines.native.driver import GREEDY, Driver, RecordingBackend, Running
from tests.engines.native.random_heads import (
    BLOCK_PLACES,
    MEDUSA_BLOCKS,
    add_mtp,
    asked,
    head_tensors,
    save_demo_head,
    save_head,
)
from tests.tiny_models import save_tiny
from train_demo_model import Progress, Run, make_optimizers, resume, save_checkpoint
from train_draft_head import export, train_step

KINDS: tuple[HeadKind, ...] = ("eagle", "medusa", "block")
PARAMS = (GREEDY, SamplingParams(temperature=0.9, seed=4), SamplingParams(frequency_penalty=0.8, seed=5))


class HeadedRecording(RecordingBackend, HeadedBackend):
    """A backend with a head that the driver can drive."""


def made(folder: Path, head: Path | None = None, **options: Any) -> HeadedRecording:
    kwargs: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 4, "block_size": 4, "threads": 1}
    kwargs["dtype"] = "float32"
    return HeadedRecording(folder, head=head or folder, **(kwargs | options))


def proposals(backend: HeadedRecording, sequence: Running, count: int, least: float = 0.0) -> list[int]:
    """What the head proposes; tokens that the driver may still use."""
    count = min(count, sequence.max_new - len(sequence.outputs) - 1)
    if count < 1:
        return []
    return list(backend.drafter.draft([asked(sequence, count)], least)[0].token_ids)


# -- the head and its twin


@torch.no_grad()
def twin(tokens: Sequence[int], count: int, path: Path) -> list[int]:
    """What the demo model's head proposes behind `tokens`, computed anew in plain torch."""
    net = load_net(DEMO_MODEL)
    head, guesses, found = load_head(path, net.config), list[torch.Tensor](), list(tokens)
    hidden = net.hidden(torch.tensor([tokens]))[0]
    for _ in range(count):
        known = [torch.zeros(net.config.hidden_size), *hidden[: len(tokens) - 1], *guesses]
        output = head(net, torch.tensor([found]), torch.stack(known)[None], [])[0, -1]
        guesses.append(output)
        found.append(int(net.logits(output).argmax()))
    return found[len(tokens) :]


def test_training_guesses_in_a_row_what_the_head_proposes() -> None:
    """All places of a text at once, as training does it, beside one place after the other."""
    net = load_net(DEMO_MODEL)
    head = load_head(DEMO_MODEL / HEAD_FILE, net.config)
    tokens = [1, *range(300, 312), 1, 76, 13, 400]
    with torch.no_grad():
        before = torch.nn.functional.pad(net.hidden(torch.tensor([tokens])), (0, 0, 1, 0))[:, :-1]
        outputs = head.guesses(net, torch.tensor([tokens]), before, 4)
        for start in (1, 5, 11):
            hidden, guesses = net.hidden(torch.tensor([tokens]))[0], list[torch.Tensor]()
            for number, output in enumerate(outputs):
                known = [torch.zeros(net.config.hidden_size), *hidden[:start], *guesses]
                text = torch.tensor([tokens[: start + number + 1]])
                guesses.append(head(net, text, torch.stack(known)[None], [])[0, -1])
                torch.testing.assert_close(guesses[-1], output[0, start + number], atol=1e-4, rtol=1e-4)


def test_training_learns_goes_on_and_writes_a_head(tmp_path: Path) -> None:
    net, batch = load_net(DEMO_MODEL).requires_grad_(False), [Row([*range(300, 324)], [True] * 24)]
    args = Namespace(rate=2e-3, matrix_rate=0.02)

    def begun() -> Run[AnyHead]:
        head = DemoHead(net.config)
        head.start_from(net)
        return Run(head, make_optimizers(head, args), Progress(), head.forward)

    run, again = begun(), begun()
    first, *_, last = [train_step(run, net, batch, 3) for _ in range(4)]
    assert last < first
    save_checkpoint(run, tmp_path / "head.pt")
    resume(again, tmp_path / "head.pt")
    torch.manual_seed(1)
    expected = train_step(run, net, batch, 3)
    torch.manual_seed(1)
    assert train_step(again, net, batch, 3) == expected
    path = tmp_path / "own.safetensors"
    export(again.net, DEMO_MODEL, path)
    backend = made(DEMO_MODEL, path)
    driver = Driver(backend)
    sequence = driver.add([1, *range(300, 310)], 9)
    driver.step()
    assert proposals(backend, sequence, 3) == twin(sequence.tokens, 3, path)


def test_the_shipped_head_is_small() -> None:
    assert (DEMO_MODEL / HEAD_FILE).stat().st_size <= 2_000_000


def test_start_up_may_measure_prompts(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    save_head(tmp_path)
    backend = made(tmp_path, measure_prefill=True)
    assert backend.capability().prefill_token_s > 0
    backend.drafter.check()


def test_a_window_may_pass_tokens_before_their_kv_is_written(tmp_path: Path) -> None:
    save_tiny(tmp_path, "mistral-window")
    save_head(tmp_path)
    backend = made(tmp_path)
    driver = Driver(backend)
    sequence = driver.add(list(range(5, 45)), 40)
    for _ in range(28):
        driver.step()
    backend._rows.row(sequence.row).tables[0][:11] = array("i", [NO_PAGE] * 11)  # as behind a window
    assert len(proposals(backend, sequence, 4)) == 4
    backend.drafter.check()


WAYS = ("torch", "kernels", "recorded")
Twin = Callable[[list[int], int, Path], list[int]]
"""What a file's head proposes behind tokens, so many, computed anew in plain torch."""


def check_beside_twin(path: Path, way: str, twin: Twin, count: int) -> None:
    """A head of the demo model proposes what its twin does, whatever it is computed by (`WAYS`)."""
    options: dict[str, Any] = {} if way == "torch" else {"kernels": cpu_kernels}
    if way == "recorded":
        options["capture"] = lambda _: None
    backend = made(DEMO_MODEL, path, **options)
    chosen = random.Random(3)
    driver = Driver(backend, (11,), propose=lambda s: proposals(backend, s, count)[: chosen.randrange(5)])
    sequences = [driver.add([1, *range(300, 330 + i), 1, 76], 24, name=f"r{i}") for i in range(2)]
    for _ in range(9):
        driver.step()
        backend.drafter.check()
        for sequence in sequences:
            if sequence.outputs and not sequence.done:
                most = sequence.max_new - len(sequence.outputs) - 1
                assert proposals(backend, sequence, count) == twin(list(sequence.tokens), count, path)[:most]


@pytest.mark.parametrize("way", WAYS)
def test_the_demo_models_head_proposes_what_its_plain_twin_does(way: str) -> None:
    check_beside_twin(DEMO_MODEL / HEAD_FILE, way, twin, 4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[(name, "eagle") for name in ("llama", "qwen3-moe", "gemma2", "olmo2", "glm4")],
        *[(name, "eagle") for name in ("deepseek3-yarn", "deepseek3-moe-groups")],
        *[(name, "block") for name in ("llama", "qwen3-moe", "olmo2", "deepseek3-yarn")],
        ("llama", "medusa"),
    ],
)
def test_decoded_and_computed_anew_rows_get_the_same_proposals(
    name: str, kind: HeadKind, tmp_path: Path
) -> None:
    save_tiny(tmp_path, name)
    if name.startswith("deepseek") and kind == "eagle":
        add_mtp(tmp_path)
    else:
        save_head(tmp_path, kind=kind)
    backend = made(tmp_path, kernels=cpu_kernels if name == "llama" else None)
    chosen = random.Random(1)
    driver = Driver(backend, (7,), propose=lambda s: proposals(backend, s, 3)[: chosen.randrange(4)])
    old = driver.add(list(range(5, 20)), 40)
    while len(old.outputs) < 20:
        driver.step()
    tokens, expected = list(old.tokens), proposals(backend, old, 5)
    driver.propose = lambda _: ()
    new = driver.add(tokens[:-1], 40, name="new")
    while not new.outputs:
        driver.step()
    assert new.tokens == tokens
    assert proposals(backend, new, 5) == expected
    assert len(expected) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_get_what_they_get_alone(kind: HeadKind, tmp_path: Path) -> None:
    """Greedy, sampled and penalized, with different lengths."""
    save_tiny(tmp_path, "llama")
    save_head(tmp_path, kind=kind)
    params = [*PARAMS, SamplingParams(temperature=5.0, seed=1), SamplingParams(temperature=5.0, seed=2)]

    def behind(chosen: Sequence[SamplingParams]) -> list[list[int]]:
        backend = made(tmp_path, max_num_seqs=8)
        driver = Driver(backend)
        rows = [driver.add([5, 6, 7, 8], 20, each, name=f"r{i}") for i, each in enumerate(chosen)]
        driver.step()
        wanted = [asked(sequence, 6 - int(sequence.name[1:]) % 2) for sequence in rows]
        found = backend.drafter.draft(wanted, 0.0)
        return [[*sequence.outputs, *each.token_ids] for sequence, each in zip(rows, found, strict=True)]

    together, alone = behind(params), [behind([each])[0] for each in params]
    assert [len(found) for found in together] == [7, 6, 7, 6, 7]
    assert all(found == own[: len(found)] for found, own in zip(together, alone, strict=True))
    assert together[3] != together[4][:6]  # drawn with their seeds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "dtype"), [("llama", "float64"), ("deepseek3-yarn", "float32")])
def test_outputs_are_those_without_a_head(name: str, dtype: str, kind: HeadKind, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    plain = RecordingBackend(tmp_path, num_blocks=64, max_num_seqs=4, block_size=4, threads=1, dtype=dtype)
    save_head(tmp_path, kind=kind)
    backend = made(tmp_path, dtype=dtype)

    def outputs(used: RecordingBackend, *, proposes: bool) -> list[list[int]]:
        driver = Driver(used, (9, 3), propose=lambda s: proposals(backend, s, 6) if proposes else ())
        done = [driver.add(list(range(3 + i, 12 + 5 * i)), 30, PARAMS[i], name=f"r{i}") for i in range(3)]
        driver.step()
        driver.step()
        driver.preempt(done[1])
        driver.run()
        used.execute(ExecutionPlan(0, left=tuple(driver.left)))
        return [sequence.outputs for sequence in done]

    expected = outputs(plain, proposes=False)
    assert outputs(backend, proposes=False) == expected
    assert outputs(backend, proposes=True) == expected


@pytest.mark.parametrize(
    ("kind", "most"), [("eagle", MOST_TOKENS), ("medusa", MEDUSA_BLOCKS), ("block", BLOCK_PLACES)]
)
def test_rows_without_a_fresh_hidden_state_get_no_proposal(kind: HeadKind, most: int, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    save_head(tmp_path, kind=kind)
    backend = made(tmp_path)
    driver = Driver(backend, (9,))
    sequence = driver.add(list(range(5, 20)), 30)
    assert not proposals(backend, sequence, 4)  # it has not joined
    driver.step()
    assert not proposals(backend, sequence, 4)  # a part of the prompt is computed
    driver.step()
    assert len(proposals(backend, sequence, 4)) == 4
    assert len(proposals(backend, sequence, 99)) == most
    sequence.tokens.append(7)  # not what the backend has drawn
    assert not proposals(backend, sequence, 4)
    sequence.tokens.pop()
    assert not proposals(backend, sequence, 4, least=1.0)  # never certain
    backend.execute(ExecutionPlan(1, left=(sequence.row,)))
    assert not proposals(backend, sequence, 4)


def test_hidden_states_are_written_before_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "llama")
    save_head(tmp_path)
    found = []
    for most in (head_drafter.MOST_HELD, 3):
        monkeypatch.setattr(head_drafter, "MOST_HELD", most)
        backend = made(tmp_path)
        driver = Driver(backend)
        sequence = driver.add(list(range(5, 20)), 30)
        for _ in range(12):
            driver.step()
            backend.drafter.check()
        found.append(proposals(backend, sequence, 6))
    assert found[0] == found[1]
    assert found[0]


# -- any order of calls


class HeadedSteps(RuleBasedStateMachine):
    """Requests come, are preempted and are asked about in any order; a step may fail and be repeated."""

    folder: Path
    """Of a model and its head, of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = made(self.folder)
        self.random = random.Random(0)
        self.driver = Driver(self.backend, (5, 2), propose=self._propose)
        self.all: list[Running] = []

    def _propose(self, sequence: Running) -> list[int]:
        if self.random.random() < 0.4:
            return []
        found = proposals(self.backend, sequence, self.random.randrange(1, 6))
        return [token if self.random.random() < 0.8 else (token + 1) % 97 for token in found]

    @precondition(lambda self: len(self.driver.running) + len(self.driver.joining) < 4)
    @rule(length=st.integers(1, 12), kind=st.integers(0, 2))
    def add(self, length: int, kind: int) -> None:
        name = f"r{len(self.all)}"
        prompt = [self.random.randrange(3, 97) for _ in range(length)]
        self.all.append(self.driver.add(prompt, 12, PARAMS[kind], name=name))

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.driver.running or self.driver.joining:
                self.driver.step()

    @precondition(lambda self: self.driver.running)
    @rule(which=st.integers(0, 3))
    def preempt(self, which: int) -> None:
        running = self.driver.running
        self.driver.preempt(running[which % len(running)])

    @rule(rests=st.booleans())
    def rest(self, rests: bool) -> None:
        """Requests that run meanwhile get no proposals, others do."""
        drafter = self.backend.drafter
        drafter.rest() if rests else drafter.wake()
        assert not (rests and drafter.is_ready)

    @precondition(lambda self: self.driver.running and not self.driver.joining)
    @rule()
    def fail(self) -> None:
        """The backend fails in the middle of a step, and the step is repeated."""
        plan, chunks = self.driver._plan()
        self.backend.fail_with = RuntimeError("broken")
        with pytest.raises(RuntimeError, match="broken"):
            self.backend.execute(plan)
        self.driver._commit(plan, chunks, self.backend.execute(plan))
        self.driver.left = [row for row in self.driver.left if row not in plan.left]

    @invariant()
    def books_are_right(self) -> None:
        self.backend.drafter.check()

    def teardown(self) -> None:
        self.driver.run()
        self.backend.execute(ExecutionPlan(0, left=tuple(self.driver.left)))
        plain = Driver(self.backend)
        for sequence in self.all:
            again = plain.add(sequence.tokens[: sequence.num_prompt], 12, sequence.params, name=sequence.name)
            plain.run()
            assert again.outputs == sequence.outputs


@pytest.mark.parametrize("kind", KINDS)
def test_any_order_of_calls(kind: HeadKind, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    save_head(tmp_path, kind=kind)
    HeadedSteps.folder = tmp_path
    run_state_machine_as_test(
        HeadedSteps, settings=settings(max_examples=examples(12), stateful_step_count=12, deadline=None)
    )


# -- in an engine


@pytest.mark.parametrize(("kind", "least"), [("eagle", 0.3), ("block", 0.1), ("medusa", 0.0)])
def test_texts_with_a_head_of_the_demo_model_are_those_without(
    kind: HeadKind, least: float, tmp_path: Path
) -> None:
    """In small chunks and a small pool, with prefix hits and preemption."""
    scale = 0.0 if kind == "medusa" else 0.2  # such blocks propose what the model has drawn, once more
    path = save_demo_head(tmp_path / "head.safetensors", kind, scale=scale)
    prompts = [
        "What is 12 + 30?",
        "Repeat: fox, owl, bear",
        "What is 12 + 31?",
        "Sort: 5, 2, 9, 1",
        "What is 77 + 22?",
    ] * 2
    params = [
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=0.9, seed=3, max_tokens=30, n=2),
    ]

    def texts(speculative: dict[str, Any]) -> tuple[list[list[int]], int]:
        keys = {"scheduler.max_num_seqs": 5, "scheduler.max_batched_tokens": 24, "kv.num_blocks": 24}
        with load(None, keys | {"speculative.adaptive": False} | speculative) as llm:
            chats = [[{"role": "user", "content": text}] for text in prompts]
            done = [one for each in params for one in llm.generate(chats, each)]
            counts = llm.diagnostics().speculation
            return [choice.token_ids for one in done for choice in one.choices], sum(counts.accepted)

    expected, _ = texts({})
    options = {"model": str(path), "min_probability": 0.0}
    found, num_accepted = texts({"speculative.method": "heads", "speculative.method_options": options})
    assert found == expected
    assert num_accepted > least * sum(map(len, expected))
    if kind == "eagle":
        assert texts({"speculative.method": "auto", "speculative.adaptive": True})[0] == expected


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("another model", "of another model"),
        ("no mark", "without a mark"),
        ("a shape", "eh_proj.weight: config.json implies shape"),
        ("a kind", "of the kind 'hydra' .*; known are eagle, medusa, block"),
        ("a stranger", r"has model\.norm\.weight and lacks model\.layers\.3\.eh_proj\.weight; "),
        (
            "masks of a block drafter",
            r"mask_embed; a head of the kind eagle .* reads model\.layers\.3\.\w+\.weight",
        ),
        ("no file", "there is no draft head"),
        ("no safetensors", "cut short or not a safetensors file"),
    ],
)
def test_a_file_that_is_no_head_of_the_model_is_refused(change: str, told: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    path = save_head(tmp_path)
    tensors, mark = head_tensors(tmp_path), {TRAINED_FOR: "0" * 32}
    name = next(name for name in tensors if name.endswith("eh_proj.weight"))
    kept = {key: value for key, value in load_file(path).items() if key != name}
    if change == "another model":
        save_file(tensors, path, mark)
    elif change == "no mark":
        save_file(tensors, path)
    elif change == "a kind":
        save_file(tensors, path, mark | {HEAD_KIND: "hydra"})
    elif change in ("a shape", "a stranger"):
        extra = (
            {name: tensors[name][:-1].clone()}
            if change == "a shape"
            else {"model.norm.weight": tensors[name]}
        )
        save_file(kept | extra, path, {TRAINED_FOR: head_mark(tmp_path, Checkpoint(tmp_path))})
    elif change == "masks of a block drafter":
        masks = head_tensors(tmp_path, kind="block")
        save_file(masks, path, {TRAINED_FOR: head_mark(tmp_path, Checkpoint(tmp_path))})
    elif change == "no file":
        path.unlink()
    else:
        path.write_bytes(b"{}")
    with pytest.raises((ModelError, WeightShapeError), match=told):
        made(tmp_path)


def test_auto_takes_what_the_model_has(tmp_path: Path) -> None:
    def method(**keys: Any) -> str:
        sections = {"model": {"name": str(tmp_path)}, "kv": {"num_blocks": 32}} | keys
        engine = build_engine(Config.model_validate({"speculative": {"method": "auto"}} | sections))
        try:
            return "none" if engine.speculation is None else type(engine.speculation._proposer).__name__
        finally:
            engine.close()

    save_tiny(tmp_path, "llama")
    assert method() == "Suffix"
    for kind in KINDS:
        save_head(tmp_path, kind=kind)
        assert method() == "Heads"
    (tmp_path / HEAD_FILE).unlink()
    save_tiny(tmp_path, "deepseek3-yarn")
    assert method() == "Suffix"
    add_mtp(tmp_path)
    assert method() == "Heads"
    save_tiny(tmp_path, "qwen3-next")
    assert method() == "none"


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"speculative": {"method": "heads"}, "parallel": {"tensor": 2}},
            r"on one rank: set parallel\.\* to 1",
        ),
        (
            {"speculative": {"method": "auto", "method_options": {"model": "x"}}},
            "auto takes no method_options",
        ),
        ({"speculative": {"method": "heads", "method_options": {"model": 3}}}, "a file or a folder, not 3"),
        (
            {"speculative": {"method": "heads", "method_options": {"model": "nowhere"}}},
            "there is no draft head",
        ),
        (
            {"speculative": {"method": "heads", "method_options": {"min_probability": 2}}},
            "min_probability must be from 0 to 1",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=told):
        build_engine(Config.model_validate({"kv": {"num_blocks": 32}} | keys)).close()


def test_heads_need_a_backend_that_runs_them() -> None:
    able = CapabilityDescriptor(
        "other", "float32", 97, 128, 64, 4, 8, features=frozenset({"speculative_decoding"})
    )
    heads = Config.model_validate({"speculative": {"method": "heads"}})
    with pytest.raises(ConfigError, match="needs a backend that runs a model's draft head"):
        build_speculation(heads, able, build_backend)


def test_a_model_with_other_layers_takes_no_head(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma4")
    with pytest.raises(ModelError, match="takes no draft head"):
        made(tmp_path)
