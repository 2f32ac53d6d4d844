"""Whether a checkpoint has a model's parameters, each plain or as a `WeightFormat` stores it, and what else.

By its headers, before anything is loaded, and by the few values that headers do not tell: shapes that are
stored as tensors, and biases that the model has no place for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from sagellm.core.errors import MissingWeightsError, UnsupportedModelError, WeightShapeError
from sagellm.core.protocols.quantization import StoredTensor, WeightFormat
from sagellm.engines.native.checkpoint import FLOATS, Checkpoint
from sagellm.engines.native.weights import Parameter, Piece

_SHOWN = 4
_HARMLESS = ("rotary_emb.inv_freq", ".masked_bias", "decoder.version", "lm_head.weight")
"""Constants that can be computed, and the head of a model whose embedding is its head."""
log = logging.getLogger("sagellm.weights")


def check(plan: Sequence[Parameter], checkpoint: Checkpoint, stored: WeightFormat | None = None) -> None:
    """Raise unless the checkpoint has every piece in its shape, as it is or in the format `stored`.

    `MissingWeightsError` names the missing tensors, `WeightShapeError` the tensor, expected and found shape,
    `UnsupportedModelError` one of a dtype that is none of a weight or of its format, and biases that are not
    zero of modules that have none. A warning names all else that is not used.
    """
    pieces = [piece for parameter in plan for piece in parameter.pieces]
    wanted = dict(one for piece in pieces for one in stored_tensors(piece, checkpoint, stored))
    found = {name: stored_name(checkpoint, name) for name in wanted}
    missing = [name for name, tensor in wanted.items() if not tensor.optional and not found[name]]
    if missing:
        raise MissingWeightsError(f"{checkpoint.folder} lacks {_few(missing)}")
    for name, tensor in wanted.items():
        at = found[name]
        if at is not None:
            _check_tensor(checkpoint, at, tensor)
    _check_unused(pieces, checkpoint, set(found.values()))


def _check_tensor(checkpoint: Checkpoint, name: str, tensor: StoredTensor) -> None:
    entry = checkpoint.entries[name]
    if entry.shape != tensor.shape:
        raise WeightShapeError(
            f"{name}: config.json implies shape {list(tensor.shape)}, the checkpoint has {list(entry.shape)}"
        )
    if entry.dtype not in tensor.dtypes:
        raise UnsupportedModelError(
            f"{name}: config.json implies {' or '.join(tensor.dtypes)}, the checkpoint has {entry.dtype}; "
            "only a quantization_config says what other numbers mean"
        )
    values = checkpoint.tensor(name).tolist() if tensor.values else []
    if values != list(tensor.values):
        raise WeightShapeError(
            f"{name}: config.json implies {list(tensor.values)}, the checkpoint has {values}"
        )


def _check_unused(pieces: Iterable[Piece], checkpoint: Checkpoint, used: set[str | None]) -> None:
    """GPTQ's writers give every module a bias, zeros where the model has none: those change nothing. What is
    of no bias's dtype is none.
    """
    biases = {piece.name.rpartition(".")[0] + ".bias" for piece in pieces}
    biases |= {name.removeprefix("model.") for name in biases}
    biases = {name for name in biases & checkpoint.entries.keys() if checkpoint.entries[name].dtype in FLOATS}
    unused = [name for name in checkpoint.entries if name not in used and not name.endswith(_HARMLESS)]
    wrong = [name for name in unused if name in biases and checkpoint.tensor(name).any()]
    if wrong:
        raise UnsupportedModelError(
            f"{checkpoint.folder} has {_few(wrong)}, not zero, for modules that have no bias by config.json: "
            "correct that (architectures, attention_bias, mlp_bias, enable_bias), or take the biases out"
        )
    others = [name for name in unused if name not in biases]
    if others:
        log.warning("not used, config.json describes a model without: %s", _few(others))


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def is_quantized(piece: Piece, checkpoint: Checkpoint, stored: WeightFormat) -> bool:
    """Whether the checkpoint has the piece in the format `stored`: any of its tensors, in its dtype."""
    if len(piece.shape) != 2:
        return False
    module = piece.name.removesuffix("weight")
    return any(
        (found := stored_name(checkpoint, module + name)) and checkpoint.entries[found].dtype in tensor.dtypes
        for name, tensor in stored.tensors(*piece.shape).items()
    )


def stored_tensors(
    piece: Piece, checkpoint: Checkpoint, stored: WeightFormat | None
) -> list[tuple[str, StoredTensor]]:
    """The tensors of the checkpoint that make the piece, by name."""
    if stored is None or not is_quantized(piece, checkpoint, stored):
        return [(piece.name, StoredTensor(piece.shape, tuple(FLOATS)))]
    module = piece.name.removesuffix("weight")
    return [(module + name, tensor) for name, tensor in stored.tensors(*piece.shape).items()]


def stored_name(checkpoint: Checkpoint, name: str) -> str | None:
    """The name under which the checkpoint has `name`: some were saved without the leading `model.`."""
    return next((form for form in (name, name.removeprefix("model.")) if form in checkpoint), None)
