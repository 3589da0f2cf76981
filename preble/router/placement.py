"""A place at a server for one request that somebody else sends there: the gateway, which passes bodies on as they are.
Owns the booking of that request from `Router.place` until its end, and nothing of what is sent.

    placement = await router.place(token_ids, max_new_tokens=64)
    try:
        ...                                     # send it to placement.url; where that fails:
        await placement.failed("it broke off")  # the same request has another place, or an error is raised
        placement.first_token(cached_tokens=7)
        placement.finish(output_tokens=12)
    finally:
        placement.cancel()                      # does nothing after finish

Whatever happens, what was booked is given back once: by `finish`, by `cancel`, by an error of `failed`. A server that
is lost, or a first token that does not come in the client's time, is reported by `on_lost`; then there is no booking
any more, and `failed` asks for another, or raises what ended it. Belongs to its router's loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..errors import PrebleError, QueueFull, TransportError
from ..transport.engine_servers.link import ServerLink
from ..transport.engine_servers.server_info import ServerInfo, ServerOptions
from ..types import Claim, PairDecision, SessionHint
from .request import Attempt, PlacedRequest, Setback, TokenIds

if TYPE_CHECKING:
    from .fleet import Fleet, FleetWorker


@dataclass(frozen=True, slots=True)
class PrefillPlace:
    """The server that prefills what a placement's own decodes; the fields are as `Placement`'s. `doubt` asks at once
    whether it lives."""

    worker: str
    url: str
    rank: int | None
    info: ServerInfo
    options: ServerOptions
    doubt: Callable[[], None]


class PlacementOwner(Protocol):
    """What a placement asks of its router."""

    def set_back(self, placement: Placement, text: str, *, full: bool = False) -> None:
        """Its attempt has failed."""

    async def move(self, placement: Placement) -> None:
        """Start its next attempt. Raises as `Router.place`; then it has ended."""

    def first_token_of(self, placement: Placement) -> None:
        """Its output has begun."""

    def end(self, placement: Placement, reason: str | None) -> None:
        """It is over: with a reason it has finished, else it was given up."""

    def fail(self, placement: Placement) -> None:
        """It has ended with its error."""

    def wrong_report(self) -> None:
        """A server said something impossible of what was cached."""


class Placement(PlacedRequest):
    """See the module; made by `Router.place`. What it says of its server is that of the latest attempt."""

    def __init__(
        self,
        router: PlacementOwner,
        request_id: Hashable,
        token_ids: TokenIds,
        namespace: Hashable,
        *,
        client: Hashable = None,
        first_token_seconds: float = math.inf,
        session: SessionHint | None = None,
        max_new_tokens: int | None = None,
        exclude: frozenset[str] = frozenset(),
        claim: Claim | None = None,
        group: Hashable = None,
    ) -> None:
        super().__init__(
            request_id,
            token_ids,
            namespace,
            client=client,
            first_token_seconds=first_token_seconds,
            session=session,
            exclude=exclude,
            claim=claim,
            group=group,
        )
        self.on_lost: Callable[[], object] | None = None  # the attempt is over, and not by our word
        self.timer: asyncio.TimerHandle | None = None  # until which the first token is of use
        self._router = router
        self._max_new_tokens = max_new_tokens
        self._output_tokens = 0
        self._server: FleetWorker
        self._link: ServerLink
        self._prefills: FleetWorker | None = None
        self._fleet: Fleet | None = None
        self._ended = False
        self._streamed = False  # a token of its stream has come, by whichever attempt
        self._streams = False  # its link counts it among those that stream
        self.in_turn = False  # whoever sends it waits for `turn` first
        self._may_go = True  # its server is to be sent it
        self._turn: asyncio.Future[None] | None = None  # who waits for that

    # --- the server ---------------------------------------------------------------------------------------------------

    @property
    def worker(self) -> str:
        """The id of the server's rank, as the scheduler knows it."""
        return self._server.worker_id

    @property
    def url(self) -> str:
        """Where to send the request: the server's URL, without a path."""
        return self._server.address.partition("#")[0]

    @property
    def rank(self) -> int | None:
        """The data-parallel rank to name in the request; None for a server that has one only."""
        return self._link.rank if self._link.info.ranks > 1 else None

    @property
    def info(self) -> ServerInfo:
        """What the server said of itself."""
        return self._link.info

    @property
    def options(self) -> ServerOptions:
        """What the operator said of it, its API key among it."""
        return self._server.options or _NO_OPTIONS

    @property
    def prefill(self) -> PrefillPlace | None:
        """Where its prompt is to be prefilled first; None where its own server does both."""
        server = self._prefills
        if server is None or not isinstance(server.link, ServerLink):
            return None
        link = server.link
        rank = link.rank if link.info.ranks > 1 else None
        url = server.address.partition("#")[0]
        return PrefillPlace(server.worker_id, url, rank, link.info, server.options or _NO_OPTIONS, link.doubt)

    def prefilled(self) -> None:
        """The prompt is prefilled; the rest is its own server's."""
        if self._fleet is not None and self.attempt is not None:
            self._fleet.scheduler.prefill_done(self.request_id)

    async def turn(self) -> None:
        """Wait until the server is to be sent the request (`server_queue`). Raises `TransportError` where its place is
        lost meanwhile."""
        if not self._may_go and self.attempt is not None:
            self._turn = asyncio.get_running_loop().create_future()
            try:
                await self._turn
            finally:
                self._turn = None
        if self.attempt is None:
            raise TransportError(f"worker {self.worker} is lost")

    def _go(self) -> None:
        """Its turn has come, or its place is lost."""
        self._may_go = True
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    @property
    def on_output(self) -> Callable[[], None]:
        """To be called when this attempt's server has sent something, so that it is known to live."""
        return self._link.saw_output

    def saw_output(self) -> None:
        """The server has sent something, so it lives."""
        self._link.saw_output()
        self._note_stream()

    def _note_stream(self) -> None:
        """Output of its stream comes from this attempt's server, and more is to come."""
        if not self._streamed or self._streams or self.attempt is None:
            return
        if not self.attempt.first_seen:  # it was begun elsewhere, and goes on here
            self._note_begun()
        self._streams = True
        self._link.stream_began()

    def _note_begun(self) -> None:
        """This attempt's prefill is done."""
        if self.attempt is not None:
            self._link.first_token_came(self.attempt.wire_id)
        self._router.first_token_of(self)

    # --- what becomes of the request ----------------------------------------------------------------------------------

    def first_token(self, cached_tokens: int | None = None) -> None:
        """Output has begun. `cached_tokens` of the prompt were cached, where the server says so already."""
        self._stop_timer()
        self._note_cached(cached_tokens)
        self._note_begun()
        self._streamed = self.is_streamed
        self._note_stream()

    def finish(self, output_tokens: int, cached_tokens: int | None = None, reason: str = "stop") -> None:
        """The answer is whole: so many tokens of all its attempts together, or those that were emitted if more."""
        if self._ended:
            return
        self._end()
        self._note_cached(cached_tokens)
        if self.attempt is not None and not self.attempt.first_seen:
            self._link.first_token_came(self.attempt.wire_id)
        self._output_tokens = max(output_tokens, self._output_tokens)
        self._router.end(self, reason)

    def broke_off(self, error: PrebleError) -> None:
        """The answer ended with this error, which its client was sent; its server is asked at once whether it lives. Of
        one that has ended it does nothing."""
        if self._ended:
            return
        self._end()
        self._link.doubt()
        self.error = error
        self._router.fail(self)

    def cancel(self) -> None:
        """Nobody wants the answer any more, or it was no answer. Again, and after `finish`, it does nothing."""
        if not self._ended:
            self._end()
            self._router.end(self, None)

    async def start(self) -> None:
        """Find the first place; `Router.place` does. Raises as that."""
        try:
            await self._router.move(self)
        except BaseException:
            self._end()
            raise

    async def failed(self, text: str, *, full: bool = False, doubt: bool = False) -> None:
        """The attempt failed, `full` because the server takes no more: find another place. `doubt`: the server may be
        gone, it is asked at once. `on_lost` is to be set again. Raises as `Router.place`, and what ended the request
        before; it has ended then."""
        if self._ended:
            raise TransportError("the placement has ended")
        self.on_lost = None
        if doubt:
            self._link.doubt()
        self._router.set_back(self, text, full=full)
        await self.start()

    def emitted(self, token_ids: TokenIds, output_tokens: int) -> None:
        """`output_tokens` have come so far; the request goes on from `token_ids`, prompt and output."""
        self.prompt = token_ids
        self._output_tokens = output_tokens
        self.resume_by = None

    def _note_cached(self, cached_tokens: int | None) -> None:
        attempt = self.attempt
        if attempt is None or attempt.cached_tokens is not None or cached_tokens is None:
            return
        if cached_tokens <= len(self.prompt):
            attempt.cached_tokens = cached_tokens
        else:
            self._router.wrong_report()

    def _end(self) -> None:
        self._ended = True
        self._stop_timer()
        self.on_lost = None

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    # --- asked by the router ------------------------------------------------------------------------------------------

    @property
    def output_tokens(self) -> int:
        """Output tokens that were reported so far."""
        return self._output_tokens

    @property
    def tokens_left(self) -> int | None:
        """Output tokens that may still come; None where the request names no limit."""
        return None if self._max_new_tokens is None else max(self._max_new_tokens - self._output_tokens, 1)

    def tokens_so_far(self) -> TokenIds:
        """What the request is routed by."""
        return self.prompt

    def hand_over(self, attempt: Attempt, fleet: Fleet) -> None:
        """Take a place at a server. Raises `TransportError` for one that is away or no server, `QueueFull` for one that
        has as many requests as its options allow, `UnknownWorker`."""
        server = fleet.worker(attempt.worker_id)
        link = server.link
        if server.state != "ready" or not isinstance(link, ServerLink):
            raise TransportError(f"worker {attempt.worker_id} is no server that takes requests")
        if server.relayed >= (server.options or _NO_OPTIONS).max_requests:
            raise QueueFull(f"{server.relayed} requests are at {server.address}, the bound of this router")
        self._prefills, self._fleet = self._prefills_for(attempt.pair, fleet), fleet
        server.relayed += 1
        self._server, self._link = server, link

    def expected(self, attempt: Attempt, fleet: Fleet, seconds: float, now: float) -> None:
        """Wait for its turn at the server; one at two servers goes at once."""
        link = self._link

        def go() -> None:
            link.expects(attempt.wire_id, seconds)
            self._go()

        if attempt.pair is not None or not self.in_turn:
            go()
            return
        self._may_go = False
        self._server.queue.enter(self.queued(attempt, seconds, now, go))

    def _prefills_for(self, pair: PairDecision | None, fleet: Fleet) -> FleetWorker | None:
        """Take a place at the other server of a pair. Raises as `hand_over`."""
        if pair is None:
            return None
        server = fleet.worker(str(pair.prefill_worker))
        if server.state != "ready" or not isinstance(server.link, ServerLink):
            raise TransportError(f"worker {pair.prefill_worker} is no server that takes requests")
        if server.relayed >= (server.options or _NO_OPTIONS).max_requests:
            raise QueueFull(f"{server.relayed} requests are at {server.address}, the bound of this router")
        server.relayed += 1
        return server

    def take_back(self, attempt: Attempt, fleet: Fleet, *, abort: bool) -> None:
        """Leave the place; who sent the request closes its connection."""
        self._server.relayed -= 1
        self._server.queue.leave(attempt.wire_id)
        if self._prefills is not None:
            self._prefills.relayed -= 1
            self._prefills = None
        if not attempt.first_seen:
            self._link.expects_no_more(attempt.wire_id)
        if self._streams:
            self._streams = False
            self._link.stream_left()

    def set_back(self, setback: Setback) -> None:
        """The attempt is over: its server is lost, or `failed` said so."""
        self.setback = setback
        self._call_on_lost()

    def fail(self, error: PrebleError) -> None:
        """The request ends with an error, which `failed` raises."""
        if self.error is None:
            self.error = error
            self._call_on_lost()

    def _call_on_lost(self) -> None:
        self._go()
        if self.on_lost is not None:
            self.on_lost()


_NO_OPTIONS = ServerOptions()
