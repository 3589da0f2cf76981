"""Pages of other sites, in a browser that can reach this gateway: what they cause it to send is refused. Owns how such
requests are known.

Needed where no key is, and on operators' paths everywhere: a key stands in a header that no page of another site can
send without being asked. Three marks give such a request
away, all set by the browser itself:

    Host             the name in the page's address. A site may let its name lead here (DNS rebinding), so names must be
                     ours: addresses, names without a dot, those under .localhost, and `host_names`.
    Origin           the page that asks, with every POST and DELETE; it must be one of this gateway.
    Sec-Fetch-Site   the same for what carries no Origin, such as images; links may lead here.

Other programs send no Origin, and an address or a name that their operator chose. They pass. Pages of the sites in
`allowed_origins` pass, too, but on operators' paths.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from .core.header_fields import HeaderFields
from .core.http_errors import ApiError

EXPOSED = b"retry-after, x-request-id, x-preble-decision, x-preble-mode, x-preble-process, x-preble-worker"
HOSTS_KEPT, HOST_CHARS_KEPT = 256, 256  # the answers for so many hosts are kept, of names that are no longer
_PORTS = {"http": 80, "https": 443}


class Origins:
    """Which hosts and origins are this gateway's own. Immutable."""

    def __init__(self, host_names: Iterable[str]) -> None:
        self._names = frozenset(name.lower() for name in host_names)
        self._is_known = lru_cache(HOSTS_KEPT)(self._is_own_name)

    def check_host(self, headers: HeaderFields) -> None:
        """Raise `ApiError` 403 for a request to a name that is not ours: its site may have let it lead here."""
        hosts = headers.getlist("host")
        if len(hosts) > 1 or not all(map(self._is_own_host, hosts)):
            raise _foreign("the Host header is no name of this gateway; host_names lists further ones", "foreign_host")

    def check_page(self, headers: HeaderFields) -> None:
        """Raise `ApiError` 403 for a request that a page of another site has caused."""
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            raise _foreign("a request has one Host header", "foreign_host")
        for origin in headers.getlist("origin"):
            if not hosts or not _is_of(origin, hosts[0]):
                raise _foreign("pages of other origins may not use this gateway", "foreign_origin")
        is_link = headers.get("sec-fetch-mode") == "navigate" and "origin" not in headers
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_link:
            raise _foreign("pages of other sites may not use this gateway", "foreign_origin")

    def _is_own_host(self, host: str) -> bool:
        return self._is_known(host) if len(host) <= HOST_CHARS_KEPT else self._is_own_name(host)

    def _is_own_name(self, host: str) -> bool:
        name = _split(f"//{host}")[0]
        if name is None:
            return False
        return "." not in name or name.endswith(".localhost") or name in self._names or _is_address(name)


class AllowedOrigins:
    """Other sites whose pages may ask, and read the answers (CORS); operators' paths excepted. Immutable."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.lower() for origin in origins)

    def allows(self, headers: HeaderFields) -> bool:
        """Whether the page that asks is one of these."""
        if not self._origins:
            return False
        given = headers.getlist("origin")
        return len(given) == 1 and ("*" in self._origins or given[0].lower() in self._origins)

    def answer_headers(self, headers: HeaderFields) -> list[tuple[bytes, bytes]]:
        """What tells the browser so, of an answer or of what it asks beforehand."""
        found = [(b"access-control-allow-origin", headers["origin"].encode("latin-1")), (b"vary", b"origin")]
        if "access-control-request-method" not in headers:
            return [*found, (b"access-control-expose-headers", EXPOSED)]
        asked = headers.get("access-control-request-headers", "").encode("latin-1")
        return [
            *found,
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", asked or b"authorization, content-type"),
            (b"access-control-max-age", b"600"),
        ]


def _foreign(message: str, code: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code=code)


def _is_of(origin: str, host: str) -> bool:
    """Whether a page of that origin is one of the host; a proxy may have taken the encryption off."""
    scheme = origin.partition(":")[0]
    if scheme not in _PORTS:
        return False
    (theirs, their_port), (ours, our_port) = _split(origin), _split(f"//{host}")
    return theirs is not None and (theirs, their_port or _PORTS[scheme]) == (ours, our_port or _PORTS[scheme])


def _split(url: str) -> tuple[str | None, int | None]:
    """Name in lower case and port; (None, None) where it is no address."""
    try:
        parts = urlsplit(url)
        return parts.hostname, parts.port
    except ValueError:
        return None, None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
