"""What the tests of discovery's sources share: one that is asked again at once when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from preble.errors import TransportError
from preble.gateway.discovery.source import DiscoverySource
from preble.transport.tasks import running
from tests.support.transport import until


class Followed:
    """A source, and what it failed of."""

    def __init__(self, source: DiscoverySource) -> None:
        self.source = source
        self.failures: list[str] = []

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.source.run()
            except TransportError as error:
                self.failures.append(str(error))
            await asyncio.sleep(0.01)

    @property
    def addresses(self) -> list[str]:
        """What it has found."""
        return list(self.source.found().servers)

    def states(self) -> dict[str, str]:
        """Readiness by pod; nothing before the first answer."""
        if self.source.confirmed_at is None:
            return {}
        servers = self.source.found().servers.values()
        return {one.pod.name if one.pod else one.address: one.readiness.value for one in servers}

    async def until(self, **states: str) -> None:
        """Until servers are as ready as that."""
        await until(lambda: self.states() == states, "what the source says was not followed")


@asynccontextmanager
async def asked(source: DiscoverySource) -> AsyncIterator[Followed]:
    """A source that is asked while the block runs."""
    followed = Followed(source)
    try:
        async with running(followed.run()):
            yield followed
    finally:
        await source.close()
