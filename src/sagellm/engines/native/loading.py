"""From a checkpoint's files to a model's weights.

Every piece is copied once, from the file to its place, in the form in which it is multiplied. Beside the
model no more than one of its matrices is ever in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from sagellm.accel.quantization.formats import mxfp4
from sagellm.core.errors import KernelError, UnsupportedModelError
from sagellm.core.protocols.engine import Progress
from sagellm.core.protocols.fusion import (
    FusedKernel,
    KernelSet,
    LinearKernel,
    Matrix,
    QuantizedKernel,
    StoredMatrix,
)
from sagellm.core.protocols.quantization import FormatSource, QuantizedMatrix, StoredTensor, WeightQuantizer
from sagellm.engines.native.architectures import read_config
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.head_files import PlannedHead, add_head
from sagellm.engines.native.hub import model_folder
from sagellm.engines.native.implementations import check_config, described
from sagellm.engines.native.matrices import (
    NOT_QUANTIZED,
    Dense,
    Quantization,
    packed,
    packing_is_faster,
    quantization_of,
)
from sagellm.engines.native.measure import Decide, alone
from sagellm.engines.native.memory import lazy_zeros
from sagellm.engines.native.model_spec import DTYPES, ModelSpec
from sagellm.engines.native.options import dtype_name, fastest_dtype, model_length, torch_dtype, usable_device
from sagellm.engines.native.parallel.split import Split, check_stored
from sagellm.engines.native.weights import (
    EMBEDDING,
    LAYER_TABLE,
    Parameter,
    WeightPiece,
    as_stored,
    check,
    is_quantized,
    num_parameters,
    parameters,
    stored_tensors,
)

if TYPE_CHECKING:
    from sagellm.engines.native.bridge.description import BridgedSpec

log = logging.getLogger("sagellm.quantization")
_NOT_QUANTIZED = (".router.weight", ".shared_gate.weight", ".recurrent.gates.weight")
_WIDE = ("correction", ".recurrent.decay", ".recurrent.step_bias", ".recurrent.skip")
Sample = Callable[[torch.Tensor, StoredTensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model's weights: `matrices` by name without `.weight`, all others in `tensors`. `matrices` has the
    `head`. A tied head is the embedding, unless it is quantized. `layer_table` has layers' own inputs.
    Ranks behind the first of a pipeline have neither embedding nor head.
    """

    embedding: StoredMatrix | None
    matrices: dict[str, Matrix]
    tensors: dict[str, torch.Tensor]
    layer_table: StoredMatrix | None = None

    @property
    def read_bytes(self) -> int:
        """Bytes that every step reads: all but tables, of which it looks rows up."""
        tensors = (tensor.nbytes for name, tensor in self.tensors.items() if name != "positions.weight")
        return sum(matrix.nbytes for matrix in self.matrices.values()) + sum(tensors)


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A model folder whose files have been checked, and where the model will run. Nothing is loaded yet.

    With `split`, `spec` and `plan` are those of one rank; `num_weights` are the parameters of all. With a
    draft `head` `plan` has its parameters too.
    """

    folder: Path
    spec: ModelSpec | BridgedSpec
    quantization: Quantization
    device: torch.device
    max_model_len: int
    plan: Sequence[Parameter]
    num_weights: int
    checkpoint: Checkpoint
    split: Split | None = None
    head: PlannedHead | None = None

    @classmethod
    def of(
        cls, model: str | Path, device: str, max_model_len: int | None, quantizer: WeightQuantizer | None,
        formats: FormatSource | None, implementation: str = "auto", split: Split | None = None,
        head: Path | None = None,
    ) -> Self:  # fmt: skip
        """The options are those of `NativeBackend`. Raises `ModelError` for a model that cannot be served and
        `ConfigError` for an option that makes no sense. With `split`, spec and plan are those of a rank.
        `head`: where to find a draft head (`head_files.add_head`).
        """
        folder = model_folder(model, check=lambda found: check_config(found, implementation))
        config = read_config(folder)
        spec = described(config, implementation)
        quantization = quantization_of(config, quantizer, formats)
        where, length = usable_device(device), model_length(spec, max_model_len)
        spec = spec.for_length(length)
        checkpoint = Checkpoint(folder)
        if not isinstance(spec, ModelSpec):
            if head is not None:
                raise UnsupportedModelError("a draft head needs a native model; transformers runs this one")
            num_weights = num_parameters(spec.plan)
            return cls(folder, spec, quantization, where, length, spec.plan, num_weights, checkpoint)
        spec = as_stored(spec, checkpoint)
        plan = parameters(spec)
        found = None if head is None else add_head(checkpoint, spec, head, quantization.stored)
        if found is not None:
            plan += found.parameters
            if found.kind != "medusa":
                spec = replace(spec, norms_in_head=spec.draft_head.before_norm)
        check(plan, checkpoint, quantization.stored)
        num_weights = num_parameters(plan)
        if split is not None:
            split.check(spec)
            check_stored(quantization, split)
            plan, spec = split.parameters(plan, spec), split.spec(spec)
        return cls(folder, spec, quantization, where, length, plan, num_weights, checkpoint, split, found)

    @property
    def layout(self) -> ModelSpec | BridgedSpec:
        """The layers that have KV, of the model and of a draft head."""
        return self.spec if self.head is None else self.head.layout

    @property
    def label(self) -> str:
        """A suffix for the fingerprint: what makes another model of the same checkpoint."""
        if not isinstance(self.spec, ModelSpec):
            return f"{self.quantization.label}-transformers"
        is_short = any(
            rope is not None and rope.long_factors and not rope.is_long for rope in self.spec.ropes
        )
        part = "" if self.split is None else self.split.label
        return self.quantization.label + ("-short-rope" if is_short else "") + part

    def loader(
        self, dtype: str, compute_dtype: str, kernel_set: KernelSet, measured_set: KernelSet,
        decide: Decide = alone,
    ) -> WeightLoader:  # fmt: skip
        """The loader that is fastest on this machine, by measurement. It chooses `compute_dtype` where that
        is "auto", and whether matrices take the form of the kernel in `kernel_set`; `measured_set` is the
        same kernel on one thread. Of several ranks `decide` has the first choose.
        """
        wanted = torch_dtype(self.spec.dtype if dtype == "auto" else dtype)

        def computed_in() -> int:
            if compute_dtype != "auto":
                return DTYPES.index(dtype_name(torch_dtype(compute_dtype)))
            widened = kernel_set.linear is None
            fastest = fastest_dtype(wanted, self.device, self.num_weights, widened=widened)
            return DTYPES.index(dtype_name(fastest))

        computed = torch_dtype(DTYPES[decide(computed_in)])
        packs = decide(lambda: packing_is_faster(measured_set.linear, computed, wanted))
        linear = kernel_set.linear if packs else None
        return WeightLoader(
            self.checkpoint,
            self.device,
            wanted,
            computed,
            self.quantization,
            linear,
            kernel_set.quantized,
            kernel_set.grouped,
        )


@dataclass(slots=True)
class WeightLoader:
    """Loads parameters to `device`, rounded to `dtype` and held in `compute_dtype`. With a `linear` kernel
    matrices are in its form and in `dtype`. Quantized matrices are in the form of `quantized`.
    """

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    compute_dtype: torch.dtype
    quantization: Quantization = NOT_QUANTIZED
    linear: LinearKernel | None = None
    quantized: QuantizedKernel | None = None
    grouped: FusedKernel | None = None
    _warned: bool = False

    def multiplies_by_values_of(self, parameter: Parameter) -> bool:
        """Whether steps multiply by the parameter's values: not by those of a requantized embedding."""
        is_own = parameter.name != EMBEDDING or self.quantization.quantizer is None
        return parameter.is_multiplied and is_own

    def weights(self, plan: Sequence[Parameter], progress: Progress | None = None) -> ModelWeights:
        """The weights of the model that `plan` describes; `weights.check` has passed."""
        sizes = [self._stored_bytes(parameter) for parameter in plan]
        report = progress or (lambda done, total: None)
        matrices: dict[str, Matrix] = {}
        tensors: dict[str, torch.Tensor] = {}
        embedding: StoredMatrix | None = None
        layer_table: StoredMatrix | None = None
        done, total = 0, sum(sizes)
        report(done, total)
        for i, parameter in enumerate(plan):
            if parameter.name == EMBEDDING:
                embedding = self._values(parameter)
            elif parameter.name == LAYER_TABLE:
                layer_table = self._values(parameter)
            elif parameter.is_multiplied:
                matrices[parameter.name.removesuffix(".weight")] = self._matrix(parameter)
            else:
                tensors[parameter.name] = self._tensor(parameter)
            done += sizes[i]
            report(done, total)
        if "head" not in matrices and embedding is not None:
            matrices["head"] = self._tied_head(embedding)
        return ModelWeights(embedding, matrices, tensors, layer_table)

    def _tied_head(self, embedding: StoredMatrix) -> Matrix:
        quantizer = self.quantization.quantizer
        if quantizer is None:
            return embedding
        whole = embedding.rows(torch.arange(embedding.shape[0], device=self.device))
        return self._packed("head.weight", [quantizer.quantized("head.weight", whole)])

    def _matrix(self, parameter: Parameter) -> Matrix:
        codes = [_codes_in_order(piece, self.codes(piece)) for piece in parameter.pieces]
        quantized = [matrix for matrix in codes if matrix is not None]
        if len(quantized) == len(codes):
            return self._packed(parameter.name, quantized)
        quantizer = self.quantizer_of(parameter.name)
        if quantizer is None:
            return self._values(parameter)
        whole = torch.empty(parameter.shape, dtype=self.dtype)
        self._fill(Dense(whole), parameter)
        return self._packed(parameter.name, [quantizer.quantized(parameter.name, whole)])

    def quantizer_of(self, name: str) -> WeightQuantizer | None:
        """What quantizes the parameter. Routers and gates are small, and not averaged out."""
        return None if name.endswith(_NOT_QUANTIZED) else self.quantization.quantizer

    def _packed(self, name: str, pieces: Sequence[QuantizedMatrix]) -> Matrix:
        """The matrix in the kernel's form, or its values if the kernel has none."""
        try:
            return packed(pieces, self.quantized, self.compute_dtype)
        except KernelError as error:
            if not self._warned:
                log.warning("quantized matrices are held dequantized (%s, the first): %s", name, error)
                self._warned = True
        plain = self.empty((sum(piece.shape[0] for piece in pieces), pieces[0].shape[1]), multiplied=True)
        row = 0
        for piece in pieces:
            plain.store(row, piece.values().to(self.dtype).to(plain.dtype))
            row += piece.shape[0]
        return plain

    def matrix_of(self, name: str, values: torch.Tensor) -> Matrix:
        """The matrix of values in memory, in the form in which it is held."""
        if self.quantization.quantizer is not None:
            return self._packed(name, [self.quantization.quantizer.quantized(name, values.to(self.dtype))])
        matrix = self.empty(values.shape, multiplied=True)
        matrix.store(0, values.to(matrix.dtype))
        return matrix

    def _values(self, parameter: Parameter) -> StoredMatrix:
        matrix = self.empty(parameter.shape, multiplied=self.multiplies_by_values_of(parameter))
        self._fill(matrix, parameter)
        return matrix

    def _tensor(self, parameter: Parameter) -> torch.Tensor:
        # Corrections decide between nearly equal scores, which are float32; decays are exponents.
        wide = torch.promote_types(self.compute_dtype, torch.float32)
        dtype = wide if parameter.name.endswith(_WIDE) else self.compute_dtype
        tensor = torch.empty(parameter.shape, dtype=dtype, device=self.device)
        self._fill(Dense(tensor), parameter)
        return tensor

    def empty(self, shape: Sequence[int], *, multiplied: bool) -> StoredMatrix:
        """A matrix to be filled, in the form in which values are held. A table is not multiplied by."""
        outputs, inputs = shape
        if self.linear is None:
            values = torch.empty(outputs, inputs, dtype=self.compute_dtype, device=self.device)
            return Dense(values, grouped=self.grouped)
        if not multiplied:
            table = torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)
            return Dense(table, self.linear.gather)
        on_meta = self.device.type == "meta"
        zeros = partial(torch.zeros, device="meta") if on_meta else partial(lazy_zeros, huge=True)
        return self.linear.empty(outputs, inputs, self.dtype, zeros)

    def _fill(self, target: StoredMatrix, parameter: Parameter) -> None:
        """Store the values of all pieces, some rows at a time. A quantized or reordered piece is
        stored whole."""
        row = 0
        for piece in parameter.pieces:
            for part in self._parts(piece):
                target.store(row, part)
                row += len(part)

    def _parts(self, piece: WeightPiece) -> Iterable[torch.Tensor]:
        """The rows of a piece that are kept, in the model's order."""
        codes, order, kept, checkpoint = self.codes(piece), _row_order(piece), piece.kept, self.checkpoint
        if codes is None and piece.part is None and order is None:
            ranges = () if kept is None else (kept.rows, kept.columns)
            return checkpoint.parts(piece.name, self.dtype, *ranges)
        if codes is not None:
            values = codes.values()
        elif piece.part is not None:
            stored = checkpoint.tensor(piece.name)[piece.part.index]
            values = piece.ordered(stored.T if piece.part.is_transposed else stored)
        else:
            values = checkpoint.tensor(piece.name)
        if kept is not None:
            rows = torch.cat([torch.arange(first, stop) for first, stop in kept.rows])
            order = rows if order is None else order[rows]
        if kept is not None and kept.columns is not None:
            values = values[:, kept.columns[0] : kept.columns[1]]
        values = (values if order is None else values[order]).to(self.dtype)
        if codes is None and piece.part is None:
            checkpoint.release_pages(piece.name)
        return [values]

    def codes(
        self, piece: WeightPiece, outputs: int | None = None, sample: Sample = lambda tensor, _: tensor
    ) -> QuantizedMatrix | None:
        """The piece from its quantized tensors; None if it is not quantized. Raises `UnsupportedModelError`
        that names the module for values that make no matrix. `sample` makes the tensors of a matrix with
        `outputs` rows from the stored ones.
        """
        stored, checkpoint = self.quantization.stored, self.checkpoint
        if piece.part is not None:
            return self._stacked_codes(piece, outputs)
        if stored is None or not is_quantized(piece, checkpoint, stored):
            return None
        module, shape = piece.name.removesuffix("weight"), (outputs or piece.shape[0], piece.shape[1])
        tensors = {
            name: sample(checkpoint.tensor(module + name), tensor)
            for name, tensor in stored.tensors(*shape).items()
            if module + name in checkpoint
        }
        try:
            matrix = stored.matrix(tensors, *shape)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{module.removesuffix('.')}: {error}") from error
        for name in tensors:
            checkpoint.release_pages(module + name)
        return matrix

    def _stacked_codes(self, piece: WeightPiece, outputs: int | None) -> QuantizedMatrix | None:
        """One expert of a tensor that has all. None if it is not in MXFP4."""
        assert piece.part is not None
        if piece.name + "_blocks" not in self.checkpoint:
            return None
        parts = (
            self.checkpoint.tensor(piece.name + ending)[piece.part.index][:outputs]
            for ending in ("_blocks", "_scales")
        )
        return mxfp4.expert(*(piece.ordered(part) for part in parts))

    def _stored_bytes(self, parameter: Parameter) -> int:
        stored, checkpoint = self.quantization.stored, self.checkpoint
        total = 0
        for piece in parameter.pieces:
            names = [name for name, _ in stored_tensors(piece, checkpoint, stored) if name in checkpoint]
            total += sum(checkpoint[name].nbytes for name in names) // (piece.part.count if piece.part else 1)
        return total


def _row_order(piece: WeightPiece) -> torch.Tensor | None:
    """The stored row of each row; None where all stay in place."""
    if not piece.num_reordered or not piece.head_order:
        return None
    order, dims = torch.arange(piece.shape[0]), torch.tensor(piece.head_order)
    heads = order[: piece.num_reordered * len(dims)].view(-1, len(dims))
    heads.copy_(heads[:, dims])
    return order


def _codes_in_order(piece: WeightPiece, codes: QuantizedMatrix | None) -> QuantizedMatrix | None:
    order = _row_order(piece)
    if codes is None or order is None:
        return codes
    zeros = None if codes.zeros is None else codes.zeros[order]
    return replace(codes, codes=codes.codes[order], scales=codes.scales[order], zeros=zeros)
