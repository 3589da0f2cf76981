"""Discovery by DNS against a DNS server that answers, refuses, and says nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from preble.errors import InvalidConfig
from preble.gateway.core.config_tables import DiscoveryTable, ServerFields
from preble.gateway.discovery import dns_source
from preble.gateway.discovery.dns_source import DnsSource, servers_of
from tests.support.discovery import Followed, asked
from tests.support.transport import asynchronous, until

message = pytest.importorskip("dns.message", reason="needs dnspython: pip install 'preble[dns]'")
rcode = pytest.importorskip("dns.rcode")
rrset = pytest.importorskip("dns.rrset")

NAME = "_http._tcp.engines.test"


class FakeDnsServer(asyncio.DatagramProtocol):
    """Answers every question with `records` (target, port), or with the code `rcode`; `is_silent`: not at all."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int]] = []
        self.rcode = rcode.NOERROR
        self.is_silent = False
        self.asked = 0
        self.transport: Any = None

    async def start(self) -> FakeDnsServer:
        """Listen on a free port."""
        loop = asyncio.get_running_loop()
        self.transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        return self

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.transport.get_extra_info('sockname')[1]}"

    def datagram_received(self, data: bytes, address: Any) -> None:
        """A question."""
        self.asked += 1
        question = message.from_wire(data)
        assert question.question[0].name.to_text() == f"{NAME}."
        answer = message.make_response(question)
        answer.set_rcode(self.rcode)
        if self.records:
            texts = [f"0 10 {port} {target}" for target, port in self.records]
            answer.answer.append(rrset.from_text(f"{NAME}.", 0, "IN", "SRV", *texts))
        if not self.is_silent:
            self.transport.sendto(answer.to_wire(), address)


@asynccontextmanager
async def following(dns_server: FakeDnsServer, **fields: Any) -> AsyncIterator[Followed]:
    """A source that follows a server."""
    table = DiscoveryTable(source="dns", name=NAME, resolver=dns_server.address, look_seconds=0.05, **fields)
    try:
        async with asked(DnsSource(table, time.monotonic, lambda: None)) as followed:
            yield followed
    finally:
        dns_server.transport.close()


@asynchronous
async def test_records_are_servers_and_a_name_without_any_is_an_empty_answer() -> None:
    server = await FakeDnsServer().start()
    server.records = [("b.engines.test.", 8000), ("a.engines.test.", 8001)]
    async with following(server, server=ServerFields(model="m")) as followed:
        await until(lambda: followed.addresses, "no answer")
        assert followed.addresses == ["http://a.engines.test:8001", "http://b.engines.test:8000"]
        assert {one.options.model for one in followed.source.found().servers.values()} == {"m"}
        version = followed.source.version
        await until(lambda: server.asked >= 4, "it does not look again")
        assert followed.source.version == version, "the same answer is no news"
        server.records, server.rcode = [], rcode.NXDOMAIN
        await until(lambda: not followed.addresses, "an answer that there are none")
        server.rcode = rcode.NOERROR
        await until(lambda: server.asked >= 8, "it does not look again")
        assert not followed.addresses and not followed.failures


@asynchronous
async def test_a_dns_server_that_fails_or_says_nothing_loses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_source, "LOOK_UP_SECONDS", 0.1)
    server = await FakeDnsServer().start()
    server.records = [("a.engines.test.", 8000)]
    async with following(server) as followed:
        await until(lambda: followed.addresses, "no answer")
        server.records, server.rcode = [], rcode.SERVFAIL
        await until(lambda: len(followed.failures) >= 2, "no failure")
        server.is_silent = True
        count = len(followed.failures)
        await until(lambda: len(followed.failures) >= count + 2, "no failure")
        assert followed.addresses == ["http://a.engines.test:8000"]
        server.records, server.rcode, server.is_silent = [("c.engines.test.", 1)], rcode.NOERROR, False
        await until(lambda: followed.addresses == ["http://c.engines.test:1"], "it does not come back")


def test_a_target_that_is_none_is_no_server_and_a_wrong_one_is_said_to_be() -> None:
    table = DiscoveryTable(source="dns", name=NAME, scheme="tcp", servers_max=2)
    found = servers_of([(".", 1), ("a", 5601), ("b c", 5601)], table)
    assert list(found.servers) == ["tcp://a:5601"] and "blanks" in found.unusable["b c:5601"]
    many = servers_of([(f"h{number}", 1) for number in range(100)], table)
    assert len(many.servers) == 8, "four times the servers that there may be are kept"


@pytest.mark.parametrize("resolver", ["localhost:53", "127.0.0.1:none", ""])
def test_a_resolver_is_an_address(resolver: str) -> None:
    with pytest.raises(InvalidConfig, match="resolver must be ADDRESS:PORT"):
        DnsSource(DiscoveryTable(source="dns", name=NAME, resolver=resolver), time.monotonic, lambda: None)


@asynchronous
async def test_a_cancellation_that_a_look_up_loses_ends_the_source_all_the_same() -> None:
    class LosesIt:
        """A resolver for which the answer comes together with the cancellation, as `asyncio.wait_for` may have it."""

        asked = 0

        async def resolve(self, *_: Any, **__: Any) -> Any:
            self.asked += 1
            try:
                await asyncio.sleep(3600.0)
            except asyncio.CancelledError:
                return SimpleNamespace(rrset=None)

    source = DnsSource(DiscoveryTable(source="dns", name=NAME), time.monotonic, lambda: None)
    resolver = source._resolver = LosesIt()
    task = asyncio.ensure_future(source.run())
    await until(lambda: resolver.asked == 1, "it does not ask")
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5.0)
    assert done == {task} and task.cancelled() and resolver.asked == 1
