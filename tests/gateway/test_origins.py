"""Which requests a page of another site has caused: names of hosts, origins, what browsers say of themselves."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="needs starlette: pip install 'preble[gateway]'")

from preble.gateway.core.header_fields import HeaderFields
from preble.gateway.core.http_errors import ApiError
from preble.gateway.origins import Origins

OWN = Origins(["Gateway.Example.com"])


def passes(**fields: str) -> bool:
    """Whether a request with these headers is let in."""
    try:
        given = HeaderFields((name.replace("_", "-").encode(), value.encode()) for name, value in fields.items())
        OWN.check_host(given)
        OWN.check_page(given)
    except ApiError as error:
        assert error.status == 403
        return False
    return True


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "10.0.0.5", "[::1]:8000", "localhost", "LOCALHOST:80", "gateway", "a.localhost:1"]
    + ["gateway.example.com", "GATEWAY.example.com:8000"],
)
def test_own_names_are_addresses_short_ones_and_those_of_the_configuration(host: str) -> None:
    assert passes(host=host)


@pytest.mark.parametrize(
    "host",
    ["example.com", "example.com:8000", "127.0.0.1.example.com", "1.2.3", "x.gateway.example.com", "", "[::1", "a:b"]
    + ["localhost.", "127.0.0.1@example.com/", "user@127.0.0.1.nip.io"],
)
def test_other_names_may_have_been_led_here(host: str) -> None:
    assert not passes(host=host)


def test_of_two_hosts_none_counts() -> None:
    two = HeaderFields([(b"host", b"localhost"), (b"host", b"localhost")])
    with pytest.raises(ApiError, match="Host"):
        OWN.check_host(two)
    with pytest.raises(ApiError, match="Host"):
        OWN.check_page(two)
    assert passes(), "a program that names no host is no browser"


def test_a_page_is_ours_where_its_origin_is_the_host() -> None:
    assert passes(host="localhost:8000", origin="http://localhost:8000")
    assert passes(host="gateway.example.com", origin="https://gateway.example.com"), "a proxy ends the encryption"
    assert passes(host="gateway.example.com:443", origin="https://gateway.example.com")
    for origin in ("http://localhost:8001", "http://127.0.0.1:8000", "null", "", "file://", "http://localhost:8000@x"):
        assert not passes(host="localhost:8000", origin=origin), origin
    assert not passes(origin="http://localhost:8000")


def test_links_lead_here_and_images_do_not() -> None:
    assert passes(host="localhost", sec_fetch_site="cross-site", sec_fetch_mode="navigate")
    assert passes(host="localhost", sec_fetch_site="same-origin", sec_fetch_mode="cors")
    assert passes(host="localhost", sec_fetch_site="none")
    assert not passes(host="localhost", sec_fetch_site="same-site", sec_fetch_mode="no-cors")
