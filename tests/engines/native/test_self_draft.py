"""`self_draft`: a draft of the served model's own weights, with fewer layers or quantized."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sagellm.accel.speculative.draft_model import DraftModel
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, SageError, UnsupportedModelError
from sagellm.core.protocols.fusion import Matrix
from sagellm.core.types import CapabilityDescriptor, Request, SamplingParams, Tokens
from sagellm.engines.build import build_backend, build_engine, load
from sagellm.engines.build_speculation import build_speculation
from sagellm.engines.engine import Engine
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.architectures import read_config, read_spec
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.feed_forward import Mlp
from sagellm.engines.native.from_config import model_footprint, num_pool_blocks
from sagellm.engines.native.model import Attention
from sagellm.engines.native.self_drafting_backend import SelfDraftingBackend
from tests.builders import run_all
from tests.engines.native.driver import attention_of, mlp_of, native_model
from tests.tiny_models import DISTINCT, RECURRENT, save_tiny

KINDS: list[dict[str, Any]] = [
    {"layers": 3},
    {"layers": [0, 2, 4]},
    {"quantization": "int8"},
    {},
    {"layers": 4, "quantization": "int4"},
]
QUICK = {"llama-head80-tied", "deepseek2-lite", "gpt-oss", "gemma3", "gemma4"}
TEXT = [*range(40, 60)]


def config(options: dict[str, Any] | None, folder: Path = DEMO_MODEL, **model: Any) -> Config:
    speculative = {"method": "self_draft", "num_tokens": 4, "adaptive": False, "method_options": options}
    return Config.model_validate(
        {
            "model": {"name": str(folder), "dtype": "float32", "max_model_len": 128, **model},
            "kv": {"num_blocks": 96},
            "scheduler": {"max_num_seqs": 4},
            "engine": {"threads": 1},
            "speculative": {} if options is None else speculative,
        }
    )


def served(options: dict[str, Any] | None, folder: Path = DEMO_MODEL, **model: Any) -> NativeBackend:
    backend = build_backend(config(options, folder, **model))
    assert isinstance(backend, NativeBackend)
    return backend


def matrices(part: Attention | Mlp) -> list[Matrix]:
    linear = (part.qkv, part.output) if isinstance(part, Attention) else (part.up, part.down)
    return [each.matrix for each in linear]


def drafter(engine: Engine) -> DraftModel:
    assert engine.speculation is not None
    proposer = engine.speculation._proposer
    assert isinstance(proposer, DraftModel)
    return proposer


def answers(given: Config, vocab: int = 700) -> dict[str, list[int]]:
    """Of several requests at once, greedy and sampled. Blocks are conserved in each step."""
    draw, engine = random.Random(3), build_engine(given)
    try:
        for number in range(6):
            prompt = Tokens([draw.randrange(3, vocab) for _ in range(draw.randrange(1, 40))])
            params = SamplingParams(temperature=0.9 * (number % 2), max_tokens=12 + number, seed=number)
            engine.add(Request(f"r{number}", prompt, params))
        proposer = drafter(engine) if given.speculative.method != "none" else None
        found = dict[str, list[int]]()
        while engine.has_work():
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
            if proposer is not None:
                proposer.check()
        assert proposer is None or not proposer._rows
        assert proposer is None or engine.diagnostics().speculation.proposed
        return found
    finally:
        engine.close()


@pytest.fixture(scope="module", params=["float64", "float32"])
def plain(request: pytest.FixtureRequest) -> tuple[str, dict[str, list[int]]]:
    return request.param, answers(config(None, dtype=request.param))


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_the_same_tokens_as_without(options: dict[str, Any], plain: tuple[str, dict[str, list[int]]]) -> None:
    """In float32 the kernels give a chain's logits the bits of plain decoding."""
    dtype, expected = plain
    assert answers(config(options, dtype=dtype)) == expected


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in DISTINCT
        if name not in RECURRENT
    ],
)
@pytest.mark.parametrize("options", [{"layers": 1}, {"quantization": "int8"}], ids=str)
def test_the_same_tokens_for_every_kind_of_kv(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    given = config(options, tmp_path, dtype="float64")
    if "layers" in options and read_spec(read_config(tmp_path)).layer_inputs is not None:
        with pytest.raises(ConfigError, match=r"inputs of their own.*set other ones, or quantization alone"):
            answers(given)
        return
    assert answers(given, vocab=250) == answers(config(None, tmp_path, dtype="float64"), vocab=250)


@pytest.mark.parametrize("options", [{"layers": 3}, {"layers": [0, 2, 4]}], ids=str)
def test_fewer_layers_take_no_memory_for_weights(options: dict[str, Any]) -> None:
    backend = served(options)
    assert isinstance(backend, SelfDraftingBackend)
    draft = backend.self_draft()
    own, part = native_model(backend), native_model(draft)
    layers = [0, 1, 2] if options["layers"] == 3 else options["layers"]
    for mine, index in zip(part._layers, layers, strict=True):
        for of in (attention_of, mlp_of):
            ours, theirs = matrices(of(mine)), matrices(of(own._layers[index]))
            assert [each is other for each, other in zip(ours, theirs, strict=True)] == [True, True]
    assert part._embed is own._embed
    assert part._head is own._head
    assert draft.get_kv_schema().num_layers == 3
    assert draft.capability().num_blocks == backend.capability().num_blocks
    draft.close()
    backend.close()


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_are_those_of_a_quantized_model(bits: int) -> None:
    """The table of embeddings and the norms stay the model's own."""
    backend, quantized = served({"quantization": f"int{bits}"}), served(None, quantization=f"int{bits}")
    assert isinstance(backend, SelfDraftingBackend)
    draft = backend.self_draft()
    assert native_model(draft)._embed is native_model(backend)._embed
    assert torch.equal(draft.prompt_logits(TEXT), quantized.prompt_logits(TEXT))
    for each in (draft, backend, quantized):
        each.close()


def test_recorded_steps_of_the_draft_compute_its_matrices() -> None:
    """They are the kernels of the model; those of other kernels would be missing in a recording."""
    backend, whole = served({"quantization": "int8"}), served(None, quantization="int8")
    assert isinstance(backend, SelfDraftingBackend)
    draft = backend.self_draft()
    if draft._steps is None:
        pytest.skip("no kernels")
    found = []
    for each in (draft, whole):
        engine = build_engine(config(None), each)
        engine.add(Request("r", Tokens([3, 77, 410, 9]), SamplingParams(temperature=0.0, max_tokens=30)))
        found.append(run_all(engine)["r"])
        engine.close()
    backend.close()
    assert found[0] == found[1]
    assert len(set(found[0])) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 5}, "from 1 to 4, or a list .* the model has 5; got 5"),
        ({"layers": 0}, "from 1 to 4"),
        ({"layers": -2}, "from 1 to 4"),
        ({"layers": True}, "from 1 to 4"),
        ({"layers": 10**9}, "from 1 to 4"),
        ({"layers": "half"}, "from 1 to 4"),
        ({"layers": []}, "from 1 to 4"),
        ({"layers": [2, 1]}, "in order"),
        ({"layers": [1, 1]}, "in order"),
        ({"layers": [0, 1, 2, 3, 4]}, "from 1 to 4"),
        ({"layers": [0, 5]}, "has layers 0 to 4"),
        ({"layers": [-1, 2]}, "has layers 0 to 4"),
        ({"layers": [0.5]}, "from 1 to 4"),
        ({"quantization": "int2"}, "quantization is int4 or int8, not 'int2'"),
        ({"quantization": 4}, "quantization is int4 or int8, not 4"),
        ({"quantization": None}, "make no quicker draft"),
        ({"num_blocks": 0}, "num_blocks is a number of blocks, not 0"),
        ({"layers": 2, "min_probability": 3.0}, "min_probability must be from 0 to 1"),
        (
            {"layers": 2, "model": "x"},
            "no option 'model'; it takes layers, quantization, num_blocks, min_prob",
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SageError, match=message):
        build_engine(config(options))


def test_what_cannot_be_its_own_draft_is_told_before_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantized already \(int8\): set layers alone, a number from 1"):
        served({}, quantization="int8")
    with pytest.raises(ConfigError, match=r"on one rank: set parallel\.\* to 1"):
        build_engine(Config.model_validate({**config({}).model_dump(), "parallel": {"tensor": 2}}))
    with pytest.raises(ConfigError, match=r"runs through transformers: set speculative\.method to suffix"):
        served({"layers": 2}, implementation="transformers")
    save_tiny(tmp_path, next(iter(sorted(RECURRENT))))
    with pytest.raises(ConfigError, match=r"recurrent layers.*set speculative.method to none"):
        served({"layers": 1}, tmp_path)
    able = CapabilityDescriptor(
        "none", "int8", 97, 128, 64, 4, 8, features=frozenset({"speculative_decoding"})
    )
    with pytest.raises(ConfigError, match=r"set engine\.backend to native"):
        build_speculation(config({}), able, build_backend)


def test_a_quantized_model_may_have_fewer_layers() -> None:
    found, expected = (answers(config(each, quantization="int8")) for each in ({"layers": 2}, None))
    assert found == expected


def test_layers_that_share_kv_need_its_source() -> None:
    spec = read_spec(read_config(DEMO_MODEL))
    own = [spec.shape(index) for index in range(spec.num_layers)]
    some = spec.with_layers([0, 3])
    assert (some.num_layers, some.windows, some.ropes) == (2, spec.windows[:2], spec.ropes[:2])
    shared = replace(spec, shapes=(*own[:3], replace(own[3], kv_source=0), own[4]))
    assert [shape.kv_source for shape in shared.with_layers([0, 2, 3]).shapes] == [0, 1, 0]
    with pytest.raises(UnsupportedModelError, match="layers 0 are left out, to whose KV others attend"):
        shared.with_layers([2, 3])


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_memory_is_told_as_it_is_taken(options: dict[str, Any]) -> None:
    told, backend = model_footprint(config(options)), served(options)
    assert isinstance(backend, SelfDraftingBackend)
    draft = backend.self_draft()
    shared = {id(each) for layer in native_model(backend)._layers for each in matrices(attention_of(layer))}
    shared |= {id(each) for layer in native_model(backend)._layers for each in matrices(mlp_of(layer))}
    shared |= {id(native_model(backend)._head)}
    copied = [each for each in backend._part.weights.matrices.values() if id(each) not in shared]
    assert sum(each.nbytes for each in copied) == pytest.approx(told.draft_weight_bytes, rel=0.01)
    assert told.draft_kv_bytes_per_token == draft.get_kv_schema().bytes_per_token
    assert told.weight_bytes == model_footprint(config(None)).weight_bytes
    draft.close()
    backend.close()


@pytest.mark.parametrize("num_blocks", [None, 10])
def test_the_pool_leaves_room_for_the_draft_s_kv(num_blocks: int | None) -> None:
    """The KV of 3 of 5 layers, and the same for the model that is not loaded yet."""
    options = {"layers": 3} if num_blocks is None else {"layers": 3, "num_blocks": num_blocks}
    sized = config(options).model_copy(update={"kv": config(None).kv.model_copy(update={"num_blocks": None})})
    size = model_footprint(sized)
    block, room = 16 * size.kv_bytes_per_token, 2_000_000
    given = {**sized.model_dump(), "kv": {"num_blocks": None, "memory_fraction": 0.5}}
    blocks = num_pool_blocks(Config.model_validate(given), size, "cpu", size.weight_bytes + 2 * room)
    expected = room / (1.6 * block) if num_blocks is None else (room - 5 * 0.6 * block) / block
    assert blocks == int(min(expected, 4 * 128 / 16))


def test_an_llm_and_its_draft() -> None:
    given = {"speculative.method": "self_draft", "speculative.adaptive": False, "kv.num_blocks": 64}
    llm, without = load(None, given), load(None, {"kv.num_blocks": 64})
    asked = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with llm, without:
        found = [each.generate(["What is 12 + 30?"], asked)[0].text for each in (llm, without)]
        counts = llm.engine.diagnostics().speculation
    assert found[0] == found[1]
    assert sum(counts.accepted) >= 0.6 * sum(counts.proposed) > 0
