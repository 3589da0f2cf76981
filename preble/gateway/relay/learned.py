"""What is learned of requests that servers answer, and serves those that come after: which prompts engines count
otherwise, who keeps which answer. Owns that these belong together; the gateway's relay has one, an endpoint picker
another."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from .pinned import PinnedAnswers
from .routing_key import Mismatches

if TYPE_CHECKING:
    from ..core.gateway import Gateway


class Learned:
    """Of all requests that come one way. Belongs to its gateway's loop."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.mismatches = Mismatches()
        self.pinned = PinnedAnswers()
        self.numbers = itertools.count(1)  # of requests, whose ids clients may repeat
