"""A torch device "npu" in Python: each of its tensors stands for one on the CPU.

`install()` renames torch's PrivateUse1 device, once in a process. Nothing of our code knows of it: what is
asked of the device goes through torch's dispatcher and through `torch.npu`, as with a chip's own torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME, FREE_BYTES, TOTAL_BYTES = "npu", 1 << 28, 1 << 29
_RESHAPES = {"aten::view", "aten::_unsafe_view", "aten::_reshape_alias"}
_DECOMPOSED = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
"""What torch makes of other operators, by sizes and strides, where a device has no operator of its own."""


class EmulatedStream:
    """Everything on the device is done at once, so there is nothing to wait for."""

    def __init__(self, device: object = None) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


class EmulatedModule:
    """`torch.npu`. `calls`: how often each of its functions and each operator was called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.Stream = EmulatedStream
        self.libraries: tuple[object, ...] = ()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None: ...

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.calls["mem_get_info"] += 1
        return FREE_BYTES, TOTAL_BYTES

    def device(self, device: object) -> Any:
        self.calls["device"] += 1
        return nullcontext()

    def synchronize(self) -> None: ...

    def current_stream(self, device: object = None) -> EmulatedStream:
        return EmulatedStream()

    @contextmanager
    def stream(self, stream: EmulatedStream) -> Iterator[None]:
        self.calls["stream"] += 1
        yield

    def get_device_properties(self, device: object) -> object:
        return object()


class _DeviceTensor(torch.Tensor):
    """A tensor that has a size and no values."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


_held: dict[int, torch.Tensor] = {}
"""By storage of a device's tensor, the tensor on the CPU. Copies that autograd makes share the storage."""


def _held_by(tensor: torch.Tensor) -> torch.Tensor:
    return _held[tensor.untyped_storage()._cdata]


def _on_device(held: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        made = torch._C._acc.create_empty_tensor(tuple(held.shape), held.dtype)
    made.__class__ = _DeviceTensor
    _held[made.untyped_storage()._cdata] = held
    return made


def install() -> EmulatedModule:
    """Make the device; returns what is then `torch.npu`."""
    module = EmulatedModule()

    def run(operator: Any, *args: Any, **options: Any) -> Any:
        """Run an operator on the CPU's tensors. Results that are arguments stay the same tensors."""
        given: dict[int, torch.Tensor] = {}

        def to_held(value: Any) -> Any:
            if isinstance(value, torch.device) and value.type == NAME:
                return torch.device("cpu")
            if not isinstance(value, torch.Tensor):
                return value
            held = _held_by(value) if value.device.type == NAME else value
            given[id(held)] = value
            return held

        target = options.get("device")
        is_copied_out = target is not None and torch.device(target).type != NAME

        def to_device(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or is_copied_out:
                return value
            return given[id(value)] if id(value) in given else _on_device(value)

        name = operator._schema.name
        module.calls[name] += 1
        held_args, held_options = tree_map(to_held, args), tree_map(to_held, options)
        if name == "aten::_copy_from":
            source, target, *_ = held_args
            target.copy_(source)
            return args[1]
        if (
            name in _RESHAPES and operator._schema.overload_name != "dtype"
        ):  # `contiguous` copies nothing here, and strides given are not those held
            result = held_args[0].reshape(held_args[1])
        else:
            result = operator(*held_args, **held_options)
        return tree_map(to_device, result)

    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(run, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if name.startswith("aten::") and any(has_kernel(name, key) for key in _DECOMPOSED):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(operator, partial(run, operator), "PrivateUse1")
    module.libraries = (rest, aten)
    return module
