"""How data planes name servers."""

from __future__ import annotations

import pytest

from preble.errors import InvalidConfig
from preble.gateway.picker.destinations import check_destinations, destination_of


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1:8000/", "10.0.0.1:8000"),
        ("http://[2001:db8::0:1]:8000", "[2001:db8::1]:8000"),
        ("https://10.0.0.1", "10.0.0.1:443"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("http://vllm-0.vllm:8000", ""),
        ("http://10.0.0.1:8000/v2", ""),
        ("tcp://10.0.0.1:5001", ""),
        ("ipc:///tmp/a", ""),
    ],
)
def test_a_server_is_named_by_address_and_port(url: str, name: str) -> None:
    assert destination_of(url) == name


def test_one_that_cannot_be_named_is_refused_with_what_to_write() -> None:
    check_destinations(["http://10.0.0.1:8000"])
    with pytest.raises(InvalidConfig, match="http://vllm-0:8000 is no server .* like http://10.0.0.1:8000"):
        check_destinations(["http://10.0.0.1:8000", "http://vllm-0:8000"])
