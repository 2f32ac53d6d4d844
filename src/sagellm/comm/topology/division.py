"""How to divide a model over accelerators, from their memory and links."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sagellm.comm.topology.placement import accelerators, best_group
from sagellm.core.blocks import cdiv
from sagellm.core.protocols.topology import LinkKind, TopologyInfo


@dataclass(frozen=True, slots=True)
class Division:
    """`tensor` ranks share each layer, or `pipeline` ranks deal the layers."""

    devices: tuple[str, ...]
    tensor: int
    pipeline: int
    reason: str


def best_division(
    info: TopologyInfo,
    free_bytes: Mapping[str, int],
    needed_bytes: int,
    tensor_sizes: Collection[int],
    num_layers: int,
) -> Division | None:
    """The fewest accelerators that hold a model, and how to use them. None where all together do not.

    `free_bytes`: by accelerator; others are not used. `needed_bytes`: weights, and KV for what is to run at
    once. `tensor_sizes`: by which the model can be divided. Tensor parallelism sends two sums for each layer,
    so it is chosen where NVLinks or another vendor's links join all devices. Over PCIe the layers are dealt,
    since only one vector for a token goes from a device to the next.
    """
    names = [device.name for device in accelerators(info) if device.name in free_bytes]
    for count in range(1, len(names) + 1):
        share = cdiv(needed_bytes, count)
        roomy = [name for name in names if free_bytes[name] >= share]
        group = best_group(info, count, roomy)
        if group is None:
            continue
        if count == 1:
            return Division(group.names, 1, 1, "it fits one device")
        if count in tensor_sizes and _are_near(info, group.names):
            return Division(group.names, count, 1, "their own links join them all")
        if count <= num_layers and not _has_near_size(info, roomy, count, tensor_sizes):
            return Division(group.names, 1, count, "no faster links than PCIe join them all")
    return None


def _has_near_size(
    info: TopologyInfo, names: Collection[str], count: int, tensor_sizes: Collection[int]
) -> bool:
    """Whether a few more devices would do for tensor parallelism."""
    for size in sorted(size for size in tensor_sizes if count <= size <= len(names)):
        group = best_group(info, size, names)
        if group is not None and _are_near(info, group.names):
            return True
    return False


def _are_near(info: TopologyInfo, names: Collection[str]) -> bool:
    links = [link for link in info.links if link.source in names and link.target in names]
    near = sum(link.kind.distance <= LinkKind.VENDOR.distance for link in links)
    return near == len(names) * (len(names) - 1)
