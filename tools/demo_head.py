"""Draft heads for the demo model, in plain torch: one class for each kind.

The kind `eagle` is one decoder layer that proposes what the model will draw. At place q the layer reads token
q and the model's last hidden state at place q - 1 (zeros at the first place), and imitates the model's
prediction at place q, with the model's embedding and output matrix. So it guesses what follows a token that
the model has drawn and not computed. For tokens further ahead it reads its own output in place of the hidden
state (EAGLE, Li et al. 2024; multi-token prediction of DeepSeek-V3). `block` is the same layer, which reads
learned masks for tokens further ahead, and `medusa` a residual block for each place, without a layer.

Shared by ``train_draft_head.py`` and the tests; the engine has its own (``engines/native/draft_head.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from demo_net import DemoNet, Layer, NetConfig, Norm
from sagellm.engines.native.checkpoint import read_header
from sagellm.engines.native.head_files import HeadKind, kind_of
from sagellm.engines.native.weights import MASKS

KeysValues = tuple[Tensor, Tensor]
AnyHead: TypeAlias = "DemoHead | DemoMedusa"


class DemoHead(nn.Module):
    """The layer, and what joins its two inputs. Parameter names are those of a DeepSeek-V3 MTP layer."""

    kind: HeadKind = "eagle"

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

    def guesses(self, net: DemoNet, tokens: Tensor, before: Tensor, count: int) -> list[Tensor]:
        """Outputs [batch, time, hidden_size] of `count` guesses in a row from every place.

        `before`: the model's hidden states, each one place later. The n-th guess from place q is at place
        q + n, n from 0.
        """
        earlier: list[KeysValues] = []
        outputs: list[Tensor] = []
        for _ in range(count):
            outputs.append(self(net, tokens, before, earlier))
            before = back(outputs[-1], 1)
        return outputs

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


class DemoBlock(DemoHead):
    """A layer that guesses a whole block at once.

    Further guesses read a learned mask each, added to the hidden state at the block's first place, and its
    token (after DFlash, arXiv:2602.06036).
    """

    kind: HeadKind = "block"

    def __init__(self, config: NetConfig, count: int) -> None:
        super().__init__(config)
        self.mask_embed = nn.Parameter(torch.zeros(count - 1, config.hidden_size))

    def guesses(self, net: DemoNet, tokens: Tensor, before: Tensor, count: int) -> list[Tensor]:
        """As of `DemoHead`."""
        earlier: list[KeysValues] = []
        outputs = [self(net, tokens, before, earlier)]
        for number, mask in enumerate(self.mask_embed[: count - 1], 1):
            own_tokens = back(tokens.unsqueeze(-1), number).squeeze(-1)
            outputs.append(self(net, own_tokens, back(before, number) + mask, earlier))
        return outputs


class DemoMedusa(nn.Module):
    """A residual block for each guess, on the model's last hidden state (Cai 2024)."""

    kind: HeadKind = "medusa"

    def __init__(self, config: NetConfig, count: int) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.medusa = nn.ModuleList(nn.ModuleDict({"linear": nn.Linear(size, size)}) for _ in range(count))

    def start_from(self, net: DemoNet) -> None:
        """Begin with what the model predicts for the next token."""
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def guesses(self, net: DemoNet, tokens: Tensor, before: Tensor, count: int) -> list[Tensor]:
        """As of `DemoHead`. No token is read."""
        blocks = [cast(nn.ModuleDict, block) for block in self.medusa]
        made = [before + F.silu(block["linear"](before)) for block in blocks[:count]]
        return [back(output, number) for number, output in enumerate(made)]


HEADS: Mapping[HeadKind, Callable[[NetConfig, int], AnyHead]] = {
    "eagle": lambda config, _: DemoHead(config), "block": DemoBlock, "medusa": DemoMedusa,
}  # fmt: skip
"""By kind, how to make a head for so many guesses."""


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


def head_names(head: AnyHead) -> str:
    """What the names of the head's tensors begin with.

    A layer is that behind the model's last.
    """
    return f"model.layers.{head.config.num_hidden_layers}." if isinstance(head, DemoHead) else ""


def load_head(path: Path, config: NetConfig) -> AnyHead:
    """The head of a file of `train_draft_head.py`, in float32."""
    stored, kind = load_file(path), kind_of(path, read_header(path)[1])
    count = len(stored) // 2 if kind == "medusa" else 1 + sum(len(w) for n, w in stored.items() if MASKS in n)
    head = HEADS[kind](config, count)
    prefix = head_names(head)
    head.load_state_dict({name.removeprefix(prefix): weight.float() for name, weight in stored.items()})
    return head.eval()
