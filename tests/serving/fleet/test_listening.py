"""Where an instance of another host listens."""

from __future__ import annotations

import logging

import pytest

from sagellm.core.errors import ConfigError
from sagellm.serving.fleet.instance_process import listening_endpoint

ELSEWHERE = "192.0.2.1"  # an address that documentation alone uses


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_it_listens_at_its_address_in_the_file(host: str) -> None:
    assert listening_endpoint("a-0", host, 1, None) == "tcp://127.0.0.1:1"


def test_an_address_of_something_else_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sagellm.fleet"):
        assert listening_endpoint("a-0", ELSEWHERE, 1, None) == "tcp://*:1"
    assert "all interfaces" in caplog.text
    assert "fleet.listen_host" in caplog.text


def test_the_configuration_goes_first() -> None:
    assert listening_endpoint("a-0", ELSEWHERE, 1, "127.0.0.2") == "tcp://127.0.0.2:1"
    assert listening_endpoint("a-0", "127.0.0.1", 1, "*") == "tcp://*:1"
    with pytest.raises(ConfigError, match="no address of this host"):
        listening_endpoint("a-0", "127.0.0.1", 1, ELSEWHERE)
