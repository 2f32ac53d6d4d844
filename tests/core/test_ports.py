"""Ports are in one place and do not collide."""

from __future__ import annotations

from sagellm.core.ports import SagePorts


def test_ports_are_distinct_and_need_no_privileges() -> None:
    values = [int(port) for port in SagePorts]
    assert len(set(values)) == len(SagePorts.__members__)
    assert all(1024 <= value < 65536 for value in values)


def test_a_port_prints_as_a_number() -> None:
    assert f"{SagePorts.HTTP}" == str(int(SagePorts.HTTP))
