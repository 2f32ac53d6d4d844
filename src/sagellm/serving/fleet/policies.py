"""Router and admission of a fleet's configuration.

The supervisor makes them too, before anything starts, so that a wrong name is an error of the command.
"""

from __future__ import annotations

from sagellm.control_plane.admission import AdmissionController
from sagellm.control_plane.quota_waits import QuotaWaits
from sagellm.control_plane.quotas import TenantQuotas
from sagellm.control_plane.rebalancing import RebalancingOptions
from sagellm.control_plane.replication import Replicator
from sagellm.control_plane.router import make_router
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.fleet_config import FleetConfig
from sagellm.core.protocols.router import Router
from sagellm.core.registry import registry


def make_fleet_router(fleet: FleetConfig, clock: Clock, chunk: int | None = None) -> Router:
    """The configured router; `fleet.separation` goes to one that separates. Raises `UnknownNameError`.

    `chunk`: tokens of a step of its instances, for the separation that models them.
    """
    options = {"name": fleet.router, **fleet.router_options}
    if "separation" in registry("router").options(fleet.router):
        known = {"chunk": chunk} if chunk is not None and fleet.separation == "adaptive" else {}
        options["separation"] = {"name": fleet.separation, **known, **fleet.separation_options}
    return make_router(options, clock)


def make_replicator(fleet: FleetConfig, index: PrefixIndex, clock: Clock) -> Replicator | None:
    """What copies hot prefixes, if that is configured. Raises `ConfigError` for an option."""
    try:
        options = RebalancingOptions(**fleet.replication_options)
    except TypeError as error:
        raise ConfigError(f"fleet.replication_options: {error}") from None
    return Replicator(index, options, clock) if fleet.replication else None


def make_admission(fleet: FleetConfig, clock: Clock) -> AdmissionController:
    """The configured admission. Raises `UnknownNameError`, and `ConfigError` for an option."""
    quotas = TenantQuotas(fleet.tenant_quotas, clock)
    return AdmissionController(
        {"name": fleet.admission, **fleet.admission_options},
        QuotaWaits(quotas, patience_s=fleet.quota_patience_s, clock=clock),
        clock=clock,
    )
