"""What the tests of discovery share: a source that is asked again at once when it fails."""

from __future__ import annotations

import asyncio

from preble.errors import TransportError
from preble.gateway.discovery.source import DiscoverySource


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
