"""What each rank has of a model, and what is refused, in words that say what would do."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, UnsupportedModelError
from sagellm.engines.build import build_backend
from sagellm.engines.native.architectures import read_spec
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.parallel.split import Split
from sagellm.engines.native.parallel.start import first_rank
from sagellm.engines.native.weights import Parameter, parameters

SHAPE: dict[str, Any] = {
    "vocab_size": 59,
    "hidden_size": 12,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "head_dim": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def spec_of(architecture: str = "Llama", **changes: Any) -> ModelSpec:
    return read_spec({"architectures": [f"{architecture}ForCausalLM"], **SHAPE, **changes})


def places(parameter: Parameter) -> list[tuple[str, int, int]]:
    """The numbers of the checkpoint that a parameter has: tensor, row and column."""
    found = []
    for piece in parameter.pieces:
        rows = [(0, piece.shape[0])] if piece.kept is None else piece.kept.rows
        columns = piece.kept.columns if piece.kept is not None else None
        first, stop = columns or (0, piece.shape[1] if len(piece.shape) > 1 else 1)
        found += [(piece.name, r, c) for a, b in rows for r in range(a, b) for c in range(first, stop)]
    return found


SHARED = ("norm", "embed", "router", "qkv.bias", "qkv.weight")


@pytest.mark.parametrize(
    ("spec", "whole_experts"),
    [
        (spec_of(attention_bias=True, mlp_bias=True), False),
        (spec_of(tie_word_embeddings=True), False),
        (spec_of("Qwen3Moe", **EXPERTS), False),
        (spec_of("Qwen3Moe", **EXPERTS), True),
    ],
    ids=["llama", "tied", "experts", "whole-experts"],
)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 12])
def test_together_the_ranks_have_everything_once(
    spec: ModelSpec, whole_experts: bool, num_ranks: int
) -> None:
    whole = {parameter.name: parameter for parameter in parameters(spec)}
    if spec.tied:
        whole["head.weight"] = whole["embed.weight"]
    counts: dict[str, list[tuple[str, int, int]]] = {name: [] for name in whole}
    for rank in range(num_ranks):
        split = Split(rank, num_ranks, 1, whole_experts)
        split.check(spec)
        own = split.parameters(list(whole.values())[: len(whole) - spec.tied], spec)
        for parameter in own:
            counts[parameter.name] += places(parameter)
            assert len(places(parameter)) == len(set(places(parameter)))
        shapes = {parameter.name: parameter.shape for parameter in parameters(split.spec(spec))}
        for parameter in own:  # the part is a model of the rank's own shape, but for whole experts and head
            if not parameter.name.startswith("head") and "experts" not in parameter.name:
                assert parameter.shape == shapes[parameter.name]
    for name, found in counts.items():
        assert set(found) == set(places(whole[name])), name
        if not any(word in name for word in SHARED):
            assert len(found) == len(set(found)), name


@pytest.mark.parametrize(
    ("spec", "whole_experts"),
    [
        (spec_of(attention_bias=True, mlp_bias=True), False),
        (spec_of(tie_word_embeddings=True), False),
        (spec_of("Qwen3Moe", **EXPERTS), False),
        (spec_of("Qwen3Moe", **EXPERTS), True),
        (spec_of("Olmo2"), False),
    ],
    ids=["llama", "tied", "experts", "whole-experts", "olmo2"],
)
@pytest.mark.parametrize("num_ranks", [1, 2, 12])
def test_mlps_are_on_other_ranks_than_the_rest(spec: ModelSpec, whole_experts: bool, num_ranks: int) -> None:
    whole = {parameter.name: parameter for parameter in parameters(spec)}
    first = Split(0, ffn=num_ranks, whole_experts=whole_experts)
    first.check(spec)
    assert (first.num_ranks, first.num_kv_ranks, first.spec(spec)) == (1 + num_ranks, 1, spec)
    own = {parameter.name: parameter for parameter in first.parameters(list(whole.values()), spec)}
    assert all(whole[name] == parameter for name, parameter in own.items())
    others = {name: list[tuple[str, int, int]]() for name in whole.keys() - own.keys()}
    for rank in range(1, 1 + num_ranks):
        for parameter in first.with_rank(rank).parameters(list(whole.values()), spec):
            others[parameter.name] += places(parameter)
    for name, found in others.items():
        assert re.fullmatch(r"layers\.\d+\.(up|down|router|experts\.up|experts\.down)\.(weight|bias)", name)
        assert set(found) == set(places(whole[name])), name
        if "router" not in name:
            assert len(found) == len(set(found)), name
    assert not any(re.search(r"\.(up|down|router|experts)\.", name) for name in own)


def test_ranks_share_a_kv_head_where_there_are_fewer() -> None:
    spec = spec_of(num_key_value_heads=2)
    assert [Split(rank, tensor=4).share(2) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert Split(0, tensor=4).spec(spec).num_kv_heads == 1


@given(st.integers(1, 40), st.integers(1, 8))
def test_layers_are_dealt_evenly(num_layers: int, num_ranks: int) -> None:
    ranges = [Split(rank, pipeline=num_ranks).layers(num_layers) for rank in range(num_ranks)]
    assert [first for first, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    sizes = [stop - first for first, stop in ranges]
    assert sum(sizes) == num_layers
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("spec", "split", "words"),
    [
        (spec_of(), Split(0, tensor=5), r"parallel.tensor = 5: 12 heads .*; 1, 2, 4, 12 would do"),
        (spec_of(), Split(0, tensor=3), "4 KV heads are neither a multiple nor a divisor of it; 1, 2, 4"),
        (
            spec_of(intermediate_size=30),
            Split(0, tensor=4),
            "MLPs of width 30 are not divisible by it; 1, 2 would do",
        ),
        (spec_of(), Split(0, pipeline=5), "the model has 4 layers; 1, 2, 3, 4 would do"),
        (spec_of(), Split(0, 2, 1, whole_experts=True), "has no experts: leave it out"),
        (
            spec_of("Qwen3Moe", **{**EXPERTS, "num_experts": 9}),
            Split(0, 2, 1, whole_experts=True),
            "9 experts are not divisible by it; 1 would do",
        ),
        (spec_of("Olmo2"), Split(0, tensor=2), "normed over the heads of all ranks together; set it to 1"),
        ("bridged", Split(0, tensor=2), "through transformers cannot be divided"),
        (
            spec_of(),
            Split(0, ffn=5),
            r"parallel.ffn = 5: MLPs of width 24 .*; 1, 2, 3, 4, 6, 8, 12, 24 would do",
        ),
        (spec_of(), Split(0, ffn=2, whole_experts=True), "has no experts: leave it out"),
    ],
)
def test_what_does_not_divide_is_refused(spec: object, split: Split, words: str) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=words):
        split.check(spec)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parallel": {"tensor": 2, "pipeline": 2}}, "ranks share the layers or deal them, not both"),
        ({"parallel": {"pipeline": 2, "whole_experts": True}}, "to the ranks of parallel.tensor"),
        ({"parallel": {"ffn": 1, "whole_experts": True}}, r"or to those of parallel\.ffn: set that to 2"),
        ({"parallel": {"ffn": 1, "tensor": 2}}, "leaves attention to one rank"),
        ({"parallel": {"tensor": 2}, "kv": {"host_gb": 0.1}}, "keep whole blocks"),
        ({"parallel": {"tensor": 2}, "kv": {"approximate_reuse": True}}, "moves KV on one rank only"),
        (
            {"parallel": {"tensor": 2, "backend_options": {"table": "x"}}},
            "name the collectives that take them",
        ),
        (
            {"parallel": {"tensor": 2, "backend": "auto", "backend_options": {"tabel": "x"}}},
            "'auto' has no tabel; it takes backend, .*table",
        ),
        (
            {"parallel": {"tensor": 2, "backend": "auto", "backend_options": {"table": 3}}},
            "table must be",
        ),
    ],
)
def test_settings_that_do_not_go_with_ranks(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        first_rank(Config.model_validate(settings), {})


def test_another_backend_runs_on_one_rank() -> None:
    config = Config.model_validate({"engine": {"backend": "simulator"}, "parallel": {"tensor": 2}})
    with pytest.raises(ConfigError, match="'simulator' runs on one rank"):
        build_backend(config)
