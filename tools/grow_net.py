"""Grows a network: the same function with more neurons, heads and layers.

After Net2Net (Chen et al. 2015). `grown` repeats every neuron, so that the wide network starts where the
narrow one ended; noise that cancels out lets the copies learn different things.
"""

from __future__ import annotations

import torch
from torch import Tensor

from demo_net import DemoNet, NetConfig

NOISE = 0.5
"""Of the parts into which a weight is split, the standard deviation beside that of an equal part."""


def grown(net: DemoNet, config: NetConfig, seed: int) -> DemoNet:
    """A network with these sizes that computes what the given one does.

    Hidden size, inner size and both numbers of heads grow by one whole factor. Added layers are copies of
    those before them, and add nothing yet. Raises ValueError for sizes to which this cannot lead.
    """
    factor, old = width_factor(net.config, config), net.state_dict()
    generator = torch.Generator().manual_seed(seed)
    embedding = old["model.embed_tokens.weight"]
    weights = {
        "model.embed_tokens.weight": embedding.repeat(1, factor),
        # The output is tied to the embedding, which sums the copies.
        "model.norm.weight": old["model.norm.weight"].repeat(factor) / factor,
    }
    sources = [
        index * net.config.num_hidden_layers // config.num_hidden_layers
        for index in range(config.num_hidden_layers)
    ]
    for index, source in enumerate(sources):
        is_added = index > 0 and sources[index - 1] == source
        begin = f"model.layers.{source}."
        for name in (name for name in old if name.startswith(begin)):
            wide = widened(old[name], factor, generator)
            silent = is_added and name.endswith(("o_proj.weight", "down_proj.weight"))
            weights[f"model.layers.{index}.{name.removeprefix(begin)}"] = wide * 0 if silent else wide
    large = DemoNet(config).to(embedding.dtype)
    large.load_state_dict(weights)
    return large


def width_factor(old: NetConfig, new: NetConfig) -> int:
    """By how much the sizes of a layer grow. Raises ValueError unless it is one whole factor for all."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    factors = {name: getattr(new, name) / getattr(old, name) for name in names}
    factor = factors["hidden_size"]
    if set(factors.values()) != {factor} or factor != int(factor) or factor < 1:
        raise ValueError(f"sizes of a layer must grow by one whole factor, got {factors}")
    if new.num_hidden_layers < old.num_hidden_layers:
        raise ValueError(f"{old.num_hidden_layers} layers cannot become {new.num_hidden_layers}")
    return int(factor)


def widened(weight: Tensor, factor: int, generator: torch.Generator) -> Tensor:
    """A gain [n] or a matrix [out, in], `factor` times as large each way.

    Each output is repeated. Each input is split over its copies, into parts that differ and add up to it.
    """
    if weight.dim() == 1:
        return weight.repeat(factor)
    parts = (weight / factor).repeat(factor, 1).unsqueeze(1).repeat(1, factor, 1)
    noise = torch.randn(parts.shape, generator=generator, dtype=weight.dtype) * parts.std() * NOISE
    return (parts + noise - noise.mean(1, keepdim=True)).flatten(1)
