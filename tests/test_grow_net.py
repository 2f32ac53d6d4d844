"""A grown network computes what the small one does, and our engine runs what is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from demo_net import DemoNet, NetConfig, rope_tables
from grow_net import grown
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.backend import NativeBackend
from train_demo_model import export

SMALL = NetConfig(
    vocab_size=768, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def small_net() -> DemoNet:
    torch.manual_seed(0)
    net = DemoNet(SMALL)
    for weight in net.parameters():
        if weight.dim() == 1:  # gains, which training moves
            weight.data.uniform_(0.5, 2.0)
    return net


def larger(factor: int, layers: int) -> NetConfig:
    return NetConfig(
        vocab_size=768, hidden_size=16 * factor, intermediate_size=24 * factor, num_hidden_layers=layers,
        num_attention_heads=4 * factor, num_key_value_heads=2 * factor, max_position_embeddings=64,
    )  # fmt: skip


def logits(net: DemoNet, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net.logits(net.hidden(tokens))


def in_float64(net: DemoNet) -> DemoNet:
    net = net.double()
    for name, table in zip(("cos", "sin"), rope_tables(net.config), strict=True):
        setattr(net, name, table.double())
    return net


@pytest.mark.parametrize(("factor", "layers"), [(1, 3), (2, 3), (1, 5), (3, 7)])
def test_the_function_stays_and_the_copies_differ(factor: int, layers: int) -> None:
    small = in_float64(small_net())
    large = in_float64(grown(small, larger(factor, layers), seed=1))
    tokens = torch.randint(0, 768, (3, 40), generator=torch.Generator().manual_seed(2))
    assert torch.allclose(logits(large, tokens), logits(small, tokens), atol=1e-9)
    if factor > 1:
        first, second = large.layers()[0].mlp.up_proj.weight.chunk(factor)[:2]
        assert not torch.allclose(first, second)


@pytest.mark.parametrize("layers", [3, 5])
def test_all_copies_learn_something_else(layers: int) -> None:
    """After one step neither copies of a neuron are equal, nor is an added layer silent."""
    net = grown(small_net(), larger(2, layers), seed=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tokens = torch.randint(0, 768, (4, 30), generator=torch.Generator().manual_seed(2))
    scores = net.logits(net.hidden(tokens[:, :-1]))
    torch.autograd.backward(torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()))
    optimizer.step()
    one_half, other_half = net.model.embed_tokens.weight.chunk(2, dim=1)
    assert not torch.equal(one_half, other_half)
    assert all(layer.mlp.down_proj.weight.abs().max() > 0 for layer in net.layers())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size": 24}, "one whole factor"),
        ({"intermediate_size": 24}, "one whole factor"),
        ({"num_key_value_heads": 2}, "one whole factor"),
        ({"num_hidden_layers": 2}, "3 layers cannot become 2"),
    ],
)
def test_sizes_that_growth_cannot_reach_are_refused(changed: dict[str, int], message: str) -> None:
    wanted = NetConfig(**{**larger(2, 3).as_dict(), **changed})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        grown(small_net(), wanted, seed=1)


def test_the_engine_runs_what_is_written(tmp_path: Path) -> None:
    net = grown(small_net(), larger(2, 4), seed=1)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    for weight in net.parameters():
        weight.data = weight.data.bfloat16().float()  # what is stored
    export(net, tokenizer, tmp_path)
    backend = NativeBackend(tmp_path, device="cpu", num_blocks=8)
    prompt = tokenizer.encode("What is 1 + 2?", add_special_tokens=False).ids
    own = backend.prompt_logits(prompt)
    backend.close()
    assert torch.allclose(own, logits(net, torch.tensor([prompt]))[0, -1], atol=1e-4)
