"""`BridgedModel`: a causal language model of transformers that computes our steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from sagellm.core.errors import MissingWeightsError, ModelError
from sagellm.core.protocols.engine import Progress
from sagellm.core.protocols.fusion import Matrix, Scores, StoredMatrix
from sagellm.core.types import KVGroup
from sagellm.engines.native.bridge.description import BridgedSpec, weight_of
from sagellm.engines.native.bridge.interface import PAGED, BridgedLayer, CurrentStep, place
from sagellm.engines.native.bridge.probe import check_steps
from sagellm.engines.native.bridge.quiet import quiet
from sagellm.engines.native.kv_cache import PagedKV, layer_kinds
from sagellm.engines.native.loading import WeightLoader
from sagellm.engines.native.model import StepInputs

log = logging.getLogger("sagellm.bridge")


class Projection(nn.Module):
    """A plain linear whose weight is one of our matrices."""

    def __init__(self, matrix: Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._matrix, self._bias, self._dtype = matrix, bias, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in] to [..., out]."""
        rows = x.reshape(-1, x.shape[-1]).to(self._dtype).contiguous()
        product: torch.Tensor = self._matrix.multiply(rows, self._bias)
        return product.contiguous().view(*x.shape[:-1], product.shape[-1]).to(x.dtype)


class HeadProjection(nn.Module):
    """The output embedding: logits in float32, or in float64 for a float64 model."""

    def __init__(self, matrix: Matrix, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._matrix, self._bias = matrix, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [1, S, hidden] to logits [1, S, vocab]."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        output = x.new_empty(x.shape[1], self._matrix.shape[0], dtype=dtype)
        logits: torch.Tensor = self._matrix.multiply(x[0].contiguous(), None, output)
        if self._bias is not None:
            logits += self._bias
        return logits[None]


class SharedTable(nn.Module):
    """A plain embedding that is also the head's matrix."""

    def __init__(self, matrix: StoredMatrix, dtype: torch.dtype) -> None:
        super().__init__()
        self._matrix, self._dtype = matrix, dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [1, T, hidden] of `ids` [1, T]."""
        rows: torch.Tensor = self._matrix.rows(ids[0], self._dtype)
        return rows[None]


class _Given(nn.Module):
    """Takes the decoder's place in a causal language model: the head's input is given."""

    hidden: torch.Tensor
    form: type[Any]
    """The class of the decoder's outputs, of which a head may read other fields."""

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.form(last_hidden_state=self.hidden)


class BridgedModel:
    """Computes steps as `DecoderModel` does, by the code of transformers.

    Attention, KV cache and matrices are ours; norms, activations, rotation and experts are the library's.
    """

    expands: None = None

    def __init__(
        self, spec: BridgedSpec, model: Any, matrices: Sequence[Matrix], dtype: torch.dtype,
        groups: Sequence[KVGroup],
    ) -> None:  # fmt: skip
        self.spec, self._dtype = spec, dtype
        self.kinds = layer_kinds(spec.windows, groups)
        self.scores: Scores | None = spec.scores
        self._current = CurrentStep()
        for i, (name, kind) in enumerate(zip(spec.attention_modules, self.kinds, strict=True)):
            place(model.get_submodule(name), BridgedLayer(i, kind, self._current))
        own = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        self.read_bytes = sum(own.values()) + sum(matrix.nbytes for matrix in matrices)
        self._causal, self._decoder, self._given = model, model.base_model, _Given()
        setattr(model, model.base_model_prefix, self._given)

    @property
    def num_calls(self) -> int:
        """Attention calls of the last step."""
        return self._current.num_calls

    def extend_to(self, max_position: int) -> None:
        """The library computes angles anew in each step."""

    @torch.inference_mode()
    def forward(self, step: StepInputs, kv: PagedKV, output: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [S, vocab] of the sampled rows; writes new K and V to `kv`."""
        return self.head(self.hidden(step, kv), output)

    def hidden(self, step: StepInputs, kv: PagedKV) -> torch.Tensor:
        """The head's input [S, hidden] for the sampled rows. Call it in inference mode. Writes the new K and
        V to `kv`.
        """
        self._current.inputs, self._current.kv, self._current.num_calls = step, kv, 0
        ids, positions = step.tokens.long()[None], step.positions[None]
        found = self._decoder(input_ids=ids, position_ids=positions, use_cache=False)
        self._given.form = type(found)
        states: torch.Tensor = found.last_hidden_state[0]
        return states if step.sampled is None else states[step.sampled]

    def head(self, hidden: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [S, vocab] of `hidden` rows, in inference mode. They are float32, or float64 for a float64
        model, and lie in `output` if that is given.
        """
        self._given.hidden = hidden[None]
        logits: torch.Tensor = self._causal(inputs_embeds=self._given.hidden, use_cache=False).logits[0]
        if output is not None:
            return output.copy_(logits)
        return logits.to(torch.promote_types(self._dtype, torch.float32))


def load(
    spec: BridgedSpec, loader: WeightLoader, groups: Sequence[KVGroup], progress: Progress | None = None
) -> BridgedModel:
    """The model with the weights of the loader's checkpoint.

    The library reads the files, in the checkpoint's dtype; then each plain linear becomes a matrix of ours
    and its tensor is freed. Raises `MissingWeightsError`, or `ModelError` with the library's reason.
    """
    folder, report = loader.checkpoint.folder, progress or (lambda done, total: None)
    total = sum(entry.nbytes for entry in loader.checkpoint.entries.values())
    report(0, total)
    try:
        with quiet():
            model, info = spec.model_class.from_pretrained(
                folder, config=spec.config, dtype=loader.dtype, attn_implementation=PAGED,
                use_safetensors=True, local_files_only=True, output_loading_info=True,
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{folder}: transformers cannot load it: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise MissingWeightsError(f"{folder} lacks {', '.join(missing[:4])} ({len(missing)} tensors)")
    matrices = _ours(spec, model.eval(), loader)
    _rest_to(model, loader)
    report(total, total)
    log.warning(
        "%s runs through transformers: slower than a native model, its norms, activations, rotation and "
        "experts are separate operations of that library", spec.architecture,
    )  # fmt: skip
    bridged = BridgedModel(spec, model, matrices, loader.compute_dtype, groups)
    check_steps(bridged, groups, loader.device, loader.compute_dtype)
    return bridged


def _ours(spec: BridgedSpec, model: Any, loader: WeightLoader) -> list[Matrix]:
    """Replace the plain linears, one after another; returns their matrices."""
    matrices: list[Matrix] = []
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    for name in spec.linears:
        linear = model.get_submodule(name)
        matrix = loader.matrix_of(f"{name}.weight", weight_of(linear))
        bias = linear.bias
        if bias is not None:
            bias = bias.data.to(loader.device, loader.compute_dtype)
        matrices.append(matrix)
        if linear is not head:
            model.set_submodule(name, Projection(matrix, bias, loader.compute_dtype))
            continue
        model.set_submodule(name, HeadProjection(matrix, bias))
        if spec.tied and type(table) is nn.Embedding and hasattr(matrix, "rows"):
            shared = cast(StoredMatrix, matrix)
            model.set_submodule(names[id(table)], SharedTable(shared, loader.compute_dtype))
    return matrices


def _rest_to(model: nn.Module, loader: WeightLoader) -> None:
    """Move what is left to the device; parameters to the computing dtype."""
    for parameter in model.parameters():
        parameter.requires_grad = False
        is_float = parameter.is_floating_point()
        parameter.data = parameter.data.to(loader.device, loader.compute_dtype if is_float else None)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                dtype = loader.compute_dtype if buffer.dtype == loader.dtype else None
                module._buffers[name] = buffer.to(loader.device, dtype)
