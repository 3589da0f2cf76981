"""What a page in the operator's browser can make it send: a table of attacks, against gateways with and without keys.

Each is what a browser really sends in that case: which headers a page may choose, and which the browser adds. None may
change the fleet, and none may read it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import Client, GatewayProcess
from tests.support.transport import WorkerProcess

EVIL = "https://evil.example"
FRIEND = "https://chat.example.com"
ADMIN, USER = "an-admin-key", "a-user-key"
FORM, TEXT, JSON = "application/x-www-form-urlencoded", "text/plain", "application/json"


@dataclass(frozen=True)
class Attack:
    """One request. `origin` is the page's; `host` is the name in the address that it asks, None: the gateway's own."""

    name: str
    method: str
    path: str
    origin: str | None = EVIL
    host: str | None = None
    site: str = "cross-site"
    mode: str = "no-cors"
    kind: str | None = None
    body: bytes = b""
    more: dict[str, str] = field(default_factory=dict)

    def headers(self, address: str) -> dict[str, str]:
        """What the browser sends."""
        found = {"host": self.host or address, "sec-fetch-site": self.site, "sec-fetch-mode": self.mode, **self.more}
        found |= {} if self.origin is None else {"origin": self.origin}
        return found | ({} if self.kind is None else {"content-type": self.kind})


def worker_body(address: str) -> bytes:
    """What adds a worker."""
    return json.dumps({"address": address}).encode()


REBOUND: dict[str, Any] = {"host": "evil.example:8000", "origin": "http://evil.example:8000", "site": "same-origin"}
ADD = ("POST", "/workers")
CHANGES = (("POST", "/workers/a/drain"), ("DELETE", "/workers/a"), ADD)
READ_PATHS = ("/workers", "/v1/preble/state", "/v1/preble/decisions/1")


def additions(worker: str) -> list[Attack]:
    """Attempts to add a worker."""
    body = worker_body(worker)
    like_address, dotted = "127.0.0.1.evil.example", "evil.example."
    own = {"kind": JSON, "body": body, "site": "same-origin"}
    return [
        Attack("form, urlencoded", *ADD, kind=FORM, body=b"address=" + worker.encode(), mode="navigate"),
        Attack("form, text/plain", *ADD, kind=TEXT, body=body, mode="navigate"),
        Attack("form of a sandboxed frame", *ADD, origin="null", kind=TEXT, body=body, mode="navigate"),
        Attack("form of a file on disk", *ADD, origin="null", kind=TEXT, body=body, mode="navigate", site="none"),
        Attack("no-cors fetch of text", *ADD, kind=TEXT, body=body),
        Attack("no-cors fetch, type with a parameter", *ADD, kind=f"{TEXT}; charset={JSON}", body=body),
        Attack("no-cors fetch without a type", *ADD, body=body),
        Attack("beacon", *ADD, kind=f"{TEXT};charset=UTF-8", body=body),
        Attack("page of another port", *ADD, origin="http://127.0.0.1:1", site="same-site", kind=TEXT, body=body),
        Attack("extension", *ADD, origin="moz-extension://abc", kind=JSON, body=body),
        Attack("old browser without Sec-Fetch", *ADD, kind=JSON, body=body, site="none", mode="cors"),
        Attack("rebinding, JSON", *ADD, kind=JSON, body=body, mode="cors", **REBOUND),
        Attack("rebinding, no type", *ADD, body=body, mode="same-origin", **REBOUND),
        Attack("rebinding, like an address", *ADD, host=like_address, origin=f"http://{like_address}", **own),
        Attack("rebinding, trailing dot", *ADD, host=dotted, origin=f"http://{dotted}", **own),
    ]


def changes(method: str, path: str, body: bytes) -> list[Attack]:
    """Attempts to change the fleet."""
    json_body: dict[str, Any] = {"mode": "cors", "kind": JSON, "body": body}
    found = [
        Attack(f"cors fetch {method} {path}", method, path, **json_body),
        Attack(f"cors fetch of a friend {method} {path}", method, path, origin=FRIEND, **json_body),
        Attack(f"rebinding {method} {path}", method, path, mode="cors", **REBOUND),
        Attack(f"override {method} {path}", "POST", path, kind=FORM, more={"x-http-method-override": method}),
    ]
    asked = {"access-control-request-method": method, "access-control-request-headers": "authorization"}
    for origin in (EVIL, FRIEND):
        name = f"preflight of {origin} {method} {path}"
        found.append(Attack(name, "OPTIONS", path, origin=origin, mode="cors", more=asked))
    return found


def looks(path: str) -> list[Attack]:
    """Attempts to look at the fleet."""
    return [
        Attack(f"script or image {path}", "GET", path, origin=None),
        Attack(f"cors fetch {path}", "GET", path, mode="cors"),
        Attack(f"cors fetch of a friend {path}", "GET", path, origin=FRIEND, mode="cors"),
        Attack(f"rebinding {path}", "GET", path, mode="cors", **{**REBOUND, "origin": None}),
    ]


def attacks(worker: str) -> list[Attack]:
    """The table; `worker` is the address of one that belongs to the attacker."""
    found = additions(worker)
    for method, path in CHANGES:
        found += changes(method, path, worker_body(worker))
    return found + [one for path in READ_PATHS for one in looks(path)]


TABLE = attacks("tcp://127.0.0.1:9")
GATEWAYS = {
    "open": {},
    "keys": {"api_keys": [USER], "admin_keys": [ADMIN]},
    "friend": {"allowed_origins": [FRIEND]},
    "keys and friend": {"api_keys": [USER], "admin_keys": [ADMIN], "allowed_origins": [FRIEND]},
}


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """The one worker there is."""
    process = WorkerProcess("--id", "a", time_scale=0.0)
    yield process
    process.stop()


@pytest.fixture(scope="module", params=sorted(GATEWAYS))
def gateway(request: Any, worker: WorkerProcess, tmp_path_factory: Any) -> Iterator[GatewayProcess]:
    """A gateway of each kind."""
    folder: Path = tmp_path_factory.mktemp("gateway")
    file = folder / "gateway.yaml"
    file.write_text(json.dumps({"workers": [worker.endpoint], **GATEWAYS[request.param]}))
    process = GatewayProcess("--config", str(file), log=folder / "log")
    process.has_keys = "api_keys" in GATEWAYS[request.param]  # type: ignore[attr-defined]
    yield process
    assert process.stop() == 0


def operator(gateway: GatewayProcess) -> Client:
    """Somebody who may see the fleet."""
    return Client(gateway.address, ADMIN if gateway.has_keys else gateway.admin_token)  # type: ignore[attr-defined]


def fleet(gateway: GatewayProcess) -> list[Any]:
    """Who is there, and in which state."""
    client = operator(gateway)
    try:
        return [(card["id"], card["state"]) for card in client.call("GET", "/workers")[2]["workers"]]
    finally:
        client.close()


@pytest.mark.parametrize("attack", TABLE, ids=lambda attack: attack.name)
def test_no_page_of_another_site_changes_or_sees_the_fleet(gateway: GatewayProcess, attack: Attack) -> None:
    client = Client(gateway.address)
    try:
        status, headers, body = client.call(
            attack.method, attack.path, attack.body or None, attack.headers(gateway.address)
        )
    finally:
        client.close()
    assert status in (401, 403, 405, 415), (status, body)
    assert "access-control-allow-origin" not in headers, "the page may not read the answer"
    assert "workers" not in body if isinstance(body, dict) else "tcp://" not in body
    assert fleet(gateway) == [("a", "ready")]


def test_an_attackers_worker_is_never_connected_to(gateway: GatewayProcess) -> None:
    """The same attacks with an address at which somebody listens: nobody comes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        client = Client(gateway.address)
        for attack in attacks(f"tcp://127.0.0.1:{listener.getsockname()[1]}"):
            client.call(attack.method, attack.path, attack.body or None, attack.headers(gateway.address))
        client.close()
        fleet(gateway)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_the_operator_does_what_no_page_can(gateway: GatewayProcess) -> None:
    """The table would pass at a gateway that refuses everything."""
    client = operator(gateway)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        status, _, card = client.call("POST", "/workers", {"address": address})
        assert (status, card["state"]) == (202, "connecting")
        assert client.call("DELETE", f"/workers/{address}")[0] == 200
    page = {"origin": f"http://{gateway.address}", "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
    assert client.call("GET", "/v1/preble/state", None, page)[0] == 200, "the live page"
    assert client.call("POST", "/workers/a/drain", None, {"content-type": FORM})[0] == 415
    assert fleet(gateway) == [("a", "ready")]
    client.close()


def test_a_key_of_a_user_is_not_one_of_an_operator(gateway: GatewayProcess) -> None:
    for key in (USER, None):
        client = Client(gateway.address, key)
        for method, path in (("POST", "/workers/a/drain"), ("DELETE", "/workers/a"), ("POST", "/workers")):
            assert client.call(method, path, b"{}")[0] in (401, 403)
        client.close()
    assert fleet(gateway) == [("a", "ready")]


def test_pages_of_allowed_sites_may_ask_and_read_and_no_others(gateway: GatewayProcess) -> None:
    has_keys = gateway.has_keys  # type: ignore[attr-defined]
    allows = FRIEND in gateway.log.parent.joinpath("gateway.yaml").read_text()
    client = Client(gateway.address, USER if has_keys else None)
    for origin in (FRIEND, EVIL):
        page = {"origin": origin, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        is_allowed = allows and origin == FRIEND
        status, headers, _ = client.call("OPTIONS", "/v1/completions", None, page | asked)
        assert (status == 204) == is_allowed
        assert headers.get("access-control-allow-origin") == (origin if is_allowed else None)
        assert headers.get("access-control-allow-headers") == ("authorization,content-type" if is_allowed else None)
        status, headers, _ = client.call("POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 1}, page)
        assert status == (200 if is_allowed or has_keys else 403), "a key is no page's to send"
        assert headers.get("access-control-allow-origin") == (origin if is_allowed else None)
        assert ("x-request-id" in headers.get("access-control-expose-headers", "")) == is_allowed
        status, headers, _ = client.call("GET", "/none", None, page)
        assert headers.get("access-control-allow-origin") == (origin if is_allowed else None), "of errors, too"
    client.close()
