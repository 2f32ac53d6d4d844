"""Router and admission of a fleet's configuration.

The supervisor makes them too, before anything starts, so that a wrong name is an error of the command.
"""

from __future__ import annotations

from sagellm.control_plane.admission import AdmissionController
from sagellm.control_plane.router import make_router
from sagellm.core.clock import Clock
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


def make_admission(fleet: FleetConfig, clock: Clock) -> AdmissionController:
    """The configured admission. Raises `UnknownNameError`, and `ConfigError` for an option."""
    return AdmissionController({"name": fleet.admission, **fleet.admission_options}, clock=clock)
