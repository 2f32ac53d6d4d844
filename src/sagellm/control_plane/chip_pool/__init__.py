"""Which instance gets which chips and cores of a host."""

from sagellm.control_plane.chip_pool.isolation import visible_chips
from sagellm.control_plane.chip_pool.needs import InstanceNeeds, RequestWork
from sagellm.control_plane.chip_pool.pool import Assignment, ChipLease, ChipPool

__all__ = ["Assignment", "ChipLease", "ChipPool", "InstanceNeeds", "RequestWork", "visible_chips"]
