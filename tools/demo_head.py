"""A draft head for the demo model, in plain torch.

It is one decoder layer that proposes what the model will draw. At place q the layer reads token q and the
model's last hidden state at place q - 1 (zeros at the first place), and imitates the model's prediction at
place q, with the model's embedding and output matrix. So it guesses what follows a token that the model has
drawn and not computed. For tokens further ahead it reads its own output in place of the hidden state (EAGLE,
Li et al. 2024; multi-token prediction of DeepSeek-V3).

Shared by ``train_draft_head.py`` and the tests; the engine has its own (``engines/native/draft_head.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from demo_net import DemoNet, Layer, NetConfig, Norm

KeysValues = tuple[Tensor, Tensor]


class DemoHead(nn.Module):
    """The layer, and what joins its two inputs. Parameter names are those of a DeepSeek-V3 MTP layer."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        layer = Layer(config)
        self.enorm, self.hnorm = Norm(config), Norm(config)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self.shared_head = nn.ModuleDict({"norm": Norm(config)})

    def start_from(self, net: DemoNet) -> None:
        """Begin as the model's last layer and norm, on the sum of both inputs."""
        layer, size = net.layers()[-1], self.config.hidden_size
        for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"):
            getattr(self, name).load_state_dict(getattr(layer, name).state_dict())
        self.shared_head["norm"].load_state_dict(net.model.norm.state_dict())
        with torch.no_grad():
            self.eh_proj.weight.copy_(torch.eye(size).repeat(1, 2))

    def forward(self, net: DemoNet, tokens: Tensor, before: Tensor, earlier: list[KeysValues]) -> Tensor:
        """The output [batch, time, hidden_size] at all places of `tokens` [batch, time].

        `before` has at place q what the layer reads beside token q. With n pairs in `earlier` it is the
        (n + 1)-th guess in a row: of a place's context, the last n places have the keys and values of the
        guesses before, each of one, and those further back the first pair, from the model's hidden states.
        Appends its own keys and values.
        """
        time = tokens.shape[1]
        cos, sin = cast(Tensor, net.cos)[:time], cast(Tensor, net.sin)[:time]
        embedded = self.enorm(net.model.embed_tokens(tokens))
        x = self.eh_proj(torch.cat([embedded, self.hnorm(before)], dim=-1))
        query, key, value = self.self_attn.project(self.input_layernorm(x), cos, sin)
        earlier.append(repeated(self.config, key, value))
        x = x + self.self_attn.o_proj(mixed(query, earlier).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.post_attention_layernorm(x))
        return cast(Tensor, self.shared_head["norm"](x))


def repeated(config: NetConfig, key: Tensor, value: Tensor) -> KeysValues:
    """Keys and values for each query head."""
    groups = config.num_attention_heads // config.num_key_value_heads
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


def mixed(query: Tensor, pairs: list[KeysValues]) -> Tensor:
    """Causal attention of the last of several guesses in a row.

    It is [batch, heads, time, head_dim].
    """
    time, count = query.shape[2], len(pairs) - 1
    query = query * query.shape[-1] ** -0.5
    old = (query @ pairs[0][0].mT).masked_fill(
        torch.ones(time, time, dtype=torch.bool).triu(1 - count), -torch.inf
    )
    own = [(query * back(pairs[count - i][0], i)).sum(-1, keepdim=True) for i in range(count)]
    weights = torch.cat([old, *own], dim=-1).softmax(-1)
    output = weights[..., :time] @ pairs[0][1]
    for i in range(count):
        output = output + weights[..., time + i, None] * back(pairs[count - i][1], i)
    return output


def back(x: Tensor, places: int) -> Tensor:
    """X [..., time, dim] as seen so many places later, zeros before its beginning."""
    return F.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :]


def head_names(config: NetConfig) -> str:
    """What the names of the head's tensors begin with.

    The head is the layer behind the model's last.
    """
    return f"model.layers.{config.num_hidden_layers}."


def load_head(path: Path, config: NetConfig) -> DemoHead:
    """The head of a file of `train_draft_head.py`, in float32."""
    head, prefix = DemoHead(config), head_names(config)
    head.load_state_dict({name.removeprefix(prefix): w.float() for name, w in load_file(path).items()})
    return head.eval()
