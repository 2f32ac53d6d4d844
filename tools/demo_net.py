"""The demo model's network in plain torch. It is a small Llama, with its weights on disk and a batched greedy
decoder.

Shared by ``train_demo_model.py`` and ``eval_demo_model.py``; the engine itself has its own forward pass.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class NetConfig:
    """Sizes of the network; the names are those of a Hugging Face Llama ``config.json``."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def as_dict(self) -> dict[str, int | float]:
        """The fields by name, ready for ``config.json``."""
        return asdict(self)


def rope_tables(config: NetConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables, each [max_position_embeddings, head_dim], in the half-split layout."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(
        torch.arange(config.max_position_embeddings, dtype=torch.float32), config.rope_theta**-exponents
    )
    doubled = torch.cat([angles, angles], dim=-1)
    return doubled.cos(), doubled.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x [..., head_dim]; cos and sin broadcast against it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Norm(nn.Module):
    """RMS normalisation over the last axis with a learned gain."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """X [..., hidden_size] to the same shape."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Grouped-query causal self-attention."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, heads, time, head_dim], positions applied."""
        batch, time, _ = x.shape
        shape = (batch, time, -1, self.config.head_dim)
        query = self.q_proj(x).view(shape).transpose(1, 2)
        key = self.k_proj(x).view(shape).transpose(1, 2)
        value = self.v_proj(x).view(shape).transpose(1, 2)
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend (causally when mask is None) and project back to [batch, time, hidden_size]."""
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """SwiGLU block."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """X [..., hidden_size] to the same shape."""
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal pass over x [batch, time, hidden_size]."""
        query, key, value = self.self_attn.project(self.input_layernorm(x), cos, sin)
        x = x + self.self_attn.mix(query, key, value, None)
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class Backbone(nn.Module):
    """Embedding, layers and last norm, under the parameter names of a Hugging Face Llama."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config)


class DemoNet(nn.Module):
    """A Llama with tied embeddings; ``state_dict()`` holds exactly the tensors of the safetensors file."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._start_weights()

    def _start_weights(self) -> None:
        """Normal(0, 0.02)-like start, the residual outputs scaled down by depth."""
        depth_scale = (2 * self.config.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = 0.02 if "embed" in name else weight.shape[1] ** -0.5 * 0.8
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=std * (depth_scale if residual else 1.0))

    def layers(self) -> list[Layer]:
        """The layers, first to last."""
        return [cast(Layer, layer) for layer in self.model.layers]

    def hidden(self, tokens: Tensor) -> Tensor:
        """Last hidden states [batch, time, hidden_size] of tokens [batch, time], positions from 0."""
        time = tokens.shape[1]
        cos, sin = cast(Tensor, self.cos)[:time], cast(Tensor, self.sin)[:time]
        x = self.model.embed_tokens(tokens)
        for layer in self.layers():
            x = layer(x, cos, sin)
        return cast(Tensor, self.model.norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocab_size] from hidden states."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache, mask: Tensor) -> Tensor:
        """Decode a chunk and append it to the cache.

        tokens and positions are [batch, new]; mask is [batch, 1, new, old + new], True where allowed.
        Returns the scores of the chunk's last place, [batch, vocab_size].
        """
        cos = cast(Tensor, self.cos)[positions].unsqueeze(1)
        sin = cast(Tensor, self.sin)[positions].unsqueeze(1)
        x = self.model.embed_tokens(tokens)
        for index, layer in enumerate(self.layers()):
            query, key, value = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            if index < len(cache):
                key = torch.cat([cache[index][0], key], dim=2)
                value = torch.cat([cache[index][1], value], dim=2)
                cache[index] = (key, value)
            else:
                cache.append((key, value))
            x = x + layer.self_attn.mix(query, key, value, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.logits(cast(Tensor, self.model.norm(x[:, -1])))


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Returns rows of ids as one [batch, time] tensor, padded on the left. Also returns the mask of real
    places."""
    width = max(len(row) for row in rows)
    tokens = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    real = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return tokens, real


@torch.inference_mode()
def greedy(net: DemoNet, rows: Sequence[Sequence[int]], stop: int, limit: int) -> list[list[int]]:
    """Continues every row of ids greedily. It ends before ``stop`` or after ``limit`` new ids."""
    tokens, real = pad_left(rows, stop)
    positions = (real.cumsum(1) - 1).clamp(min=0)
    time = tokens.shape[1]
    square = torch.ones(time, time, dtype=torch.bool).tril() & real[:, None, :]
    square = square | torch.eye(time, dtype=torch.bool)
    cache: Cache = []
    scores = net.step(tokens, positions, cache, square.unsqueeze(1))
    place = positions[:, -1:]
    done = torch.zeros(len(rows), dtype=torch.bool)
    columns: list[Tensor] = []
    while True:
        chosen = scores.argmax(-1)
        columns.append(chosen)
        done |= chosen == stop
        if bool(done.all()) or len(columns) >= limit:
            break
        place = place + 1
        real = torch.cat([real, torch.ones(len(rows), 1, dtype=torch.bool)], dim=1)
        scores = net.step(chosen[:, None], place, cache, real[:, None, None, :])
    return [cut_at(row, stop) for row in torch.stack(columns, dim=1).tolist()]


def cut_at(ids: list[int], stop: int) -> list[int]:
    """The ids before the first ``stop``."""
    return ids[: ids.index(stop)] if stop in ids else ids


def load_net(folder: Path) -> DemoNet:
    """Loads the network of a Hugging Face folder in float32. Raises FileNotFoundError if a file is absent."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = NetConfig(**{name: fields[name] for name in NetConfig(vocab_size=1).as_dict()})
    net = DemoNet(config)
    weights = {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
    net.load_state_dict(weights)
    return net.eval()
