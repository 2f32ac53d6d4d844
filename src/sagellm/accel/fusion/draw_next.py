"""`DrawNext`: rows of a recorded step go on with the greatest of their logits.

With it several steps of a draft follow each other as recorded calls, and no Python lies between them.
"""

from __future__ import annotations

import torch

from sagellm.accel.fusion.checked_kernels import CheckedKernel


class DrawNext(CheckedKernel):
    """Draws greedily, and moves a decode step's inputs on to what is drawn.

    Inputs, in this order, all contiguous but for the rows of `logits`: `logits` float32 [n, vocab]; `hidden`
    and `given` [n, size], of which the first becomes the second; of each row int64 `tokens`, `positions` and
    `slots` [n], and `spans` [n, 4] (the position is their third number, the first table entry the fourth);
    `tables`, int32, the block ids; int64 `drawn` and float32 `chances` [most, n], which are written at the
    step's place; `state`, int64 [2], how many steps were drawn and how many will be; and `block_size`. After
    the last step the rows stay where they are. A chance is NaN where a logit is. Returns nothing.
    """

    name = "draw_next"

    def reference(
        self, logits: torch.Tensor, hidden: torch.Tensor, given: torch.Tensor, tokens: torch.Tensor,
        positions: torch.Tensor, spans: torch.Tensor, slots: torch.Tensor, tables: torch.Tensor,
        drawn: torch.Tensor, chances: torch.Tensor, state: torch.Tensor, block_size: int,
    ) -> None:  # fmt: skip
        step, most = state.tolist()
        drawn[step] = logits.argmax(-1)
        chances[step] = logits.softmax(-1).amax(-1)
        state[0] += 1
        if step + 1 == most:
            return
        positions += 1
        tokens.copy_(drawn[step])
        spans[:, 2] = positions
        entries = spans[:, 3] + positions // block_size
        slots.copy_(tables[entries] * block_size + positions % block_size)
        given.copy_(hidden)

    def _obstacle(
        self, logits: torch.Tensor, hidden: torch.Tensor, given: torch.Tensor, tokens: torch.Tensor,
        positions: torch.Tensor, spans: torch.Tensor, slots: torch.Tensor, tables: torch.Tensor,
        drawn: torch.Tensor, chances: torch.Tensor, state: torch.Tensor, block_size: int,
    ) -> str:  # fmt: skip
        whole = (tokens, positions, slots, spans, drawn, state)
        if logits.dtype is not torch.float32 or logits.ndim != 2 or logits.stride(1) != 1:
            return f"logits are float32 rows, not {logits.dtype} {list(logits.shape)}"
        if any(tensor.dtype is not torch.int64 for tensor in whole) or tables.dtype is not torch.int32:
            return "tokens, positions, slots, spans, drawn and state are int64, tables int32"
        rows = len(logits)
        shapes = [tuple(tensor.shape) for tensor in (*whole[:4], chances, state)]
        if shapes != [(rows,)] * 3 + [(rows, 4), tuple(drawn.shape), (2,)] or drawn.shape[1:] != (rows,):
            return f"shapes {shapes} are not those of {rows} rows"
        if hidden.shape != given.shape or hidden.dtype != given.dtype or len(hidden) != rows:
            return f"hidden states {list(hidden.shape)} are not what a step is given, {list(given.shape)}"
        if chances.dtype is not torch.float32 or block_size < 1 or not logits.shape[1]:
            return "chances are float32, a block has a token and a vocabulary too"
        if not all(tensor.is_contiguous() for tensor in (hidden, given, tables, chances, *whole)):
            return "a tensor is not contiguous"
        return self._device_obstacle(logits, hidden, given, tables, chances, *whole)
