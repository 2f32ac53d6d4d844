"""What differs between the MTP layers of families of models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A family's names of its MTP layer, and what that layer reads. The defaults are DeepSeek-V3's.

    `root` is where the layer's tensors are; empty: behind the model's layers, as one more of them. Below it
    the layer has the names of the model's layers, and those here: the norms of the token's embedding and of
    the hidden state, the matrix that projects both to one vector (`hidden_first`: the hidden state's columns
    come first), and the norm in front of the model's head. `before_norm`: the hidden state is the model's
    before its last norm, not behind it.
    """

    root: str = ""
    token_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    last_norm: str = "shared_head.norm"
    hidden_first: bool = False
    before_norm: bool = False


DEEPSEEK_HEAD = HeadSpec()
