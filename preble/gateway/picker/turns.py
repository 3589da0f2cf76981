"""When requests are placed: one in each turn of the loop. Owns their order, and that those which are given up leave
nothing.

To place a request takes ten times as long as to pass a part of an answer on. So what came together with it and can be
answered at once is, then the request is placed, and its answer is written before another one is: whatever comes
meanwhile waits for one request, not for all that came at once. They are taken in the order in which they came, each in
a turn of its own, so that neither holds the other up for good.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol


class TurnTaker(Protocol):
    """Who waits for a turn. Hashable by identity."""

    def on_turn(self) -> object:
        """It is its turn."""


class PlacingTurns:
    """Those of one loop, and there only. As many as wait: who is given up is out at once."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[TurnTaker, None] = OrderedDict()
        self._is_due = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, taker: TurnTaker) -> None:
        """It is to have a turn, behind those that wait."""
        self._waiting[taker] = None
        self._call()

    def give_up(self, taker: TurnTaker) -> None:
        """It needs none any more. Of one that waits for none it does nothing."""
        self._waiting.pop(taker, None)

    def _call(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        self._is_due = False
        if not self._waiting:
            return
        taker, _ = self._waiting.popitem(last=False)
        if self._waiting:
            self._call()
        taker.on_turn()
