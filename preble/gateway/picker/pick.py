"""One request of a data plane's: where it goes, and what is learned of its answer. Owns the order of things (read,
routing key, place, observe, end), the booking, and what is counted; messages are `exchange`'s.

The same parts do the work as where the gateway relays: keys by tokens or by text, the router's placement, the readers
of usage. But the data plane sends the request: until it says how the server answers, the booking stands; when it ends
the exchange before the answer has ended, the booking is given back. A server that cannot be reached is the data plane's
to retry, at the further destinations that it was given.

Of two servers that share a request the one that decodes is its destination, and the other is named to the proxy beside
that one, as llm-d's have it (`PREFILLER_HEADER`): it sends the prompt there first. What cannot be shared goes to who
does both or, where nobody does, as a whole to one that decodes, unbooked.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

from ...errors import PrebleError, TransportError
from ...router.placement import Placement
from ...transport.engine_servers.http_client import TRACE_HEADERS
from ...types import BOTH, DECODE
from ..core.byte_budget import ByteShare
from ..core.gateway import Gateway
from ..core.header_fields import HeaderFields
from ..core.http_errors import ApiError, api_error_of, refusal_of, unavailable
from ..core.models import ServedModel
from ..core.request_context import RequestContext, now_in
from ..core.request_headers import OWN_HEADERS, group_of, request_id_of, timeout_of, urgency_of
from ..core.request_log import CLIENT_GONE, OTHER_ROUTE, note_request
from ..core.sessions import HINT_HEADERS, hint_of_headers
from ..relay.body import RelayedBody
from ..relay.endpoints import ENDPOINTS, POSTS, Endpoint
from ..relay.learned import Learned, changes_for, looked_over
from ..relay.pairs import SGLANG, is_separable
from ..relay.pinned import KeptAnswer
from ..relay.progress import RelayProgress, tokens_seen
from ..relay.routing_key import RoutingKey
from ..relay.usage import UsageReader, usage_reader
from .destinations import Destinations
from .messages import Fields
from .parts import PlainParts
from .turns import PlacingTurns

FAILED = frozenset({502, 503, 504})  # the server, or the way to it; it is asked at once whether it lives
MODEL_HEADER = "x-gateway-model-name"  # set by who reads bodies before us, where none is sent here
FAIRNESS_HEADER = "x-gateway-inference-fairness-id"  # whose request it is
_MORE_HEADERS = OWN_HEADERS | HINT_HEADERS | {FAIRNESS_HEADER.encode()}
PREFILLER_HEADER = "x-prefiller-host-port"  # where the prompt is prefilled
_PROXY_HEADERS = (PREFILLER_HEADER, "x-encoder-hosts-ports")  # what that proxy obeys: never a client's word
_PROXY_NAMES = frozenset(name.encode() for name in _PROXY_HEADERS)
_SHARED = frozenset({"chat", "completions"})  # kinds that the proxy sends to both
MANY = 1 << 31
_CLOSING_EVENTS = 2  # of a stream behind its last token: the choice's end, and the stream's
_BY_ID = {tuple(one.path.split("{id}")): one for one in ENDPOINTS if one.by_id}


class Picker(Learned):
    """What all requests of one picker share. Belongs to its gateway's loop."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self.destinations = Destinations(gateway.router)
        self.turns = PlacingTurns()
        self.next_whole = itertools.count().__next__  # numbers requests that go to those that decode, as a whole


class Pick:
    """One request. After `place`: `destination` is where it goes, `further` where it may go then, `headers` are to be
    set in it and `removed` ones taken out, `body` is what goes on of it, and `is_edited` whether that is another body
    than came."""

    def __init__(self, picker: Picker, fields: Fields, plain: PlainParts) -> None:
        self.plain = plain
        self.destination = ""
        self.further: list[str] = []
        self.headers: dict[str, str] = {}
        self.removed: list[str] = []
        self.body = b""
        self.is_edited = False
        gateway = self._gateway = picker.gateway
        self._picker = picker
        headers = self._headers = HeaderFields(fields)
        self._method, self._path = headers.get(":method"), headers.get(":path").partition("?")[0]
        self._endpoint, self._answer_id = endpoint_of(self._method, self._path)
        context = self._context = RequestContext(request_id_of(headers), gateway.metrics.clock())
        self._client = ""
        if headers.has_any(_MORE_HEADERS):  # most say nothing of all this
            context.session = hint_of_headers(fields)
            context.timeout_seconds = timeout_of(headers)
            self._client = headers.get(FAIRNESS_HEADER)
        self._span: Any = None
        self._share: ByteShare = gateway.bodies.share()
        self._is_live = False
        self._ended = False
        self._status = 0
        self._placement: Placement | None = None
        self._progress: RelayProgress | None = None
        self._reader: UsageReader | None = None
        self._key: RoutingKey
        self._read: RelayedBody
        self._removes_usage = False
        self._is_separable = False

    # --- the request --------------------------------------------------------------------------------------------------

    def hold(self, total: int) -> None:
        """So many bytes of its body are here. Raises `ApiError` 413, or 503 where all bodies are too many."""
        bytes_max = self._gateway.config.max_body_bytes
        if total > bytes_max:
            raise ApiError(413, f"the body is larger than {bytes_max} bytes", code="request_too_large")
        self._share.hold(total)

    async def place(self, data: bytes | None, allowed: Any, *, may_edit: bool, may_remove: bool) -> None:
        """Find its server. `data`: the body; None where the data plane does not send it. `allowed`: the destinations
        that it may go to, None for all. `may_edit`: another body may go on; `may_remove`: so may another answer.
        Raises `PrebleError`; then nothing is booked."""
        gateway, context = self._gateway, self._context
        self._admit()
        now_in(context)
        if gateway.tracing is not None:
            self._span = gateway.tracing.begin(self._headers)
            self.headers.update(TRACE_HEADERS.get())
        if self._headers.has_any(OWN_HEADERS):
            context.deadline_seconds, context.priority = urgency_of(self._headers)
            context.group = group_of(self._headers)
        body = self._read = await self._body_of(data)
        served = await self._model_of(body, data is not None)
        key = self._key = await self._picker.key_of(context, body, served)
        kept = self._picker.pinned.get(self._answer_id or body.previous_response_id)
        exclude = self._picker.all_but(kept, served.exclude | self._picker.destinations.outside(allowed))
        self._progress = RelayProgress(gateway, context, key)
        self._is_separable = self._endpoint.kind in _SHARED and is_separable(body, self._endpoint, served.engine)
        if self._headers.has_any(_PROXY_NAMES):
            self.removed += [name for name in _PROXY_HEADERS if name in self._headers]
        if self._goes_whole(served, exclude):
            self.body = data or b""
            return
        placement = self._placement = await self._placed(exclude)
        self.destination = self._picker.destinations.of(placement.url)
        self._name_others(placement, exclude)
        self._edit(data or b"", served, may_edit=may_edit, may_remove=may_remove)

    def _goes_whole(self, served: ServedModel, exclude: frozenset[str]) -> bool:
        """Where nobody does both, send what cannot be shared to a server that decodes, if one is there that can prefill
        as well: SGLang's do not."""
        destinations = self._picker.destinations
        if self._is_separable or (served.engine == SGLANG and self._endpoint.generates):
            return False
        if destinations.have_both(exclude):
            return False
        found = destinations.others("", exclude, MANY, (DECODE,))
        if found:
            self.destination = found[self._picker.next_whole() % len(found)]
        return bool(found)

    def _name_others(self, placement: Placement, exclude: frozenset[str]) -> None:
        """The server that prefills, if another one does, and where the request may go beside its first destination."""
        destinations, prefill = self._picker.destinations, placement.prefill
        count = self._gateway.config.picker_fallbacks
        if prefill is None:
            self.further = destinations.others(self.destination, exclude, count)
            return
        self.headers[PREFILLER_HEADER] = destinations.of(prefill.url)
        self.removed = [name for name in self.removed if name != PREFILLER_HEADER]
        self.further = destinations.others(self.destination, exclude | {prefill.worker}, count, (BOTH, DECODE))

    def _admit(self) -> None:
        gateway = self._gateway
        if gateway.draining:
            raise unavailable("this picker is shutting down", "draining")
        if gateway.live_choices >= gateway.config.max_live_requests:
            raise unavailable(f"{gateway.live_choices} requests are live, the bound of this picker", "queue_full")
        gateway.live_choices += 1
        self._is_live = True

    async def _body_of(self, data: bytes | None) -> RelayedBody:
        endpoint = self._endpoint
        if not data or self._answer_id is not None:
            return RelayedBody(data or b"", endpoint)
        try:
            return await looked_over(data, endpoint, self._headers)
        except ApiError:
            if endpoint.path:
                raise
            return RelayedBody(data, endpoint)  # of what nobody knows, it is no fault

    async def _model_of(self, body: RelayedBody, is_seen: bool) -> ServedModel:
        models, named = self._gateway.models, self._headers.get(MODEL_HEADER)
        if self._endpoint.path and self._answer_id is None and is_seen:
            return await models.get_now(body.model)
        name = body.model or named or None
        return models.find(name) or ServedModel("")

    async def _placed(self, exclude: frozenset[str]) -> Placement:
        placement = await self._picker.place(
            self._context, self._read, self._key, exclude, client=self._client, separable=self._is_separable
        )
        if placement.timer is not None:  # it is on its way, and nobody here can call it back
            placement.timer.cancel()
            placement.timer = None
        return placement

    def _edit(self, data: bytes, served: ServedModel, *, may_edit: bool, may_remove: bool) -> None:
        """What its server is to be sent beside what came: the rank, its own name of the model, the wish for usage."""
        placement, body = self._placement, self._read
        assert placement is not None, "it is placed"
        changes = changes_for(placement, body, served, placement.worker_claim)
        if placement.prefill is not None:  # the proxy would send it to both servers
            changes.pop("routed_dp_rank", None)
        elif placement.rank is not None:
            self.headers["x-data-parallel-rank"] = str(placement.rank)
        if may_remove:
            changes |= body.usage_changes()
        self.is_edited = bool(changes) and may_edit and bool(body.fields)
        self._removes_usage = self.is_edited and may_remove and bool(body.usage_changes())
        self.body = body.edited(changes) if self.is_edited else data

    def sent_on(self) -> None:
        """Its body has gone on; nobody needs it any more."""
        self.body = b""
        if self._placement is not None:
            self._read.forget()
        self._share.give_back()

    # --- the answer ---------------------------------------------------------------------------------------------------

    def is_elsewhere(self, destination: str) -> bool:
        """Whether the answer comes from another server than the one where it is booked."""
        return self._placement is not None and destination != self.destination

    async def follow(self, destination: str) -> None:
        """Another server than the first has it: book it there."""
        ids = self._picker.destinations.workers_at(destination)
        placement = self._placement
        if placement is None or not ids or placement.worker in ids:
            return
        prefill = placement.prefill
        there = ids if prefill is None else ids | {prefill.worker}
        placement.cancel()
        self._placement = None
        with contextlib.suppress(PrebleError):  # then it runs there without a booking
            placement = await self._placed(frozenset(self._gateway.router.fleet.worker_ids) - there)
            if placement.worker in ids:
                self._placement = placement
            else:
                placement.cancel()

    def answered(self, fields: Fields) -> None:
        """The answer's head is here."""
        headers = HeaderFields(fields)
        status = headers.get(":status")
        self._status = int(status) if status.isascii() and status.isdigit() and len(status) == 3 else 0
        if self._placement is None:
            return
        if not 200 <= self._status < 300:
            self._failed()
            return
        self._placed_for_good()
        is_stream = headers.get("content-type").startswith("text/event-stream")
        self._context.stream = is_stream
        if headers.get("content-encoding", "identity") == "identity":
            self._reader = usage_reader(self._endpoint, is_stream, remove_usage=self._removes_usage)

    def _failed(self) -> None:
        """The answer is none of a model's."""
        placement = self._placement
        if placement is None:
            return
        if self._status in FAILED:
            placement.broke_off(TransportError(f"the data plane got {self._status}"))
        else:
            placement.cancel()

    def _placed_for_good(self) -> None:
        if self._placement is not None and self._progress is not None:
            self._progress.placed(self._placement)

    def saw(self, part: bytes) -> bytes:
        """The next bytes of the answer; those that go on."""
        reader, placement = self._reader, self._placement
        if reader is None or placement is None:
            return part
        placement.saw_output()
        had = reader.first_token
        passed = reader.feed(part)
        self.plain.events += part.count(b"\n\n")
        if reader.first_token and not had:
            placement.first_token(self._cached(reader))
            if self._progress is not None:
                self._progress.first_token()
        self.plain.on_output = placement.on_output if reader.is_between_events else None
        return passed

    def whole(self) -> bytes:
        """The answer has ended; what of it was held back."""
        if self._ended:
            return b""
        reader, placement = self._reader, self._placement
        rest = b"" if reader is None else reader.end()
        if placement is not None and self._progress is not None and 200 <= self._status < 300:
            self._finish(reader or usage_reader(self._endpoint, False), placement, self._progress)
        self._end(self._status)
        return rest

    def _finish(self, reader: UsageReader, placement: Placement, progress: RelayProgress) -> None:
        kind = self._endpoint.kind
        if reader.output_tokens is None and self._context.stream:
            reader.output_tokens = tokens_seen(kind, reader, max(self.plain.events - _CLOSING_EVENTS, 0))
        reason = reader.finish_reasons[0] if reader.finish_reasons else "stop"
        placement.finish(reader.output_tokens or 0, self._cached(reader), reason)
        progress.finished(reader)
        if kind == "responses" and reader.answer_id is not None:
            self._picker.pinned.put(reader.answer_id, KeptAnswer(placement.worker, self._context.model))
        is_of_prompt = kind != "generate" or self._read.n == 1
        if self._picker.mismatches.compare(
            kind, self._context.model, self._key, reader.prompt_tokens if is_of_prompt else None
        ):
            self._gateway.metrics.tokens_differ(kind)

    def _cached(self, reader: UsageReader) -> int | None:
        decision = self._placement.decision if self._placement is not None else None
        matched = decision.matched_tokens if decision else 0
        return self._key.cached(reader.cached_tokens, reader.prompt_tokens, matched)

    # --- the end ------------------------------------------------------------------------------------------------------

    def refuse(self, error: PrebleError) -> ApiError:
        """It goes nowhere; the answer that its client gets."""
        self._context.refused = refusal_of(error)
        answer = api_error_of(error)
        self._end(answer.status)
        return answer

    def close(self, *, observed: bool) -> None:
        """The data plane has ended the exchange. Where it was still to say more, which it was only if the answer is
        `observed`, its client has gone. Again it does nothing."""
        if self._ended:
            return
        if not observed and self._status:
            self.whole()
            return
        placement, progress = self._placement, self._progress
        if placement is not None and progress is not None:
            self._placed_for_good()
            reader = self._reader
            progress.left(reader, 0 if reader is None else tokens_seen(self._endpoint.kind, reader, self.plain.events))
            placement.cancel()
        self._end(CLIENT_GONE)

    def _end(self, status: int) -> None:
        self._ended = True
        self.plain.on_output = None
        placement = self._placement
        if placement is not None:
            placement.cancel()
        self._share.give_back()
        gateway = self._gateway
        if self._is_live:
            gateway.live_choices -= 1
        seconds = gateway.metrics.clock() - self._context.started
        route = self._endpoint.path or OTHER_ROUTE
        asked = {"method": self._method, "route": route, "status": status or CLIENT_GONE}
        note_request(gateway, self._context, **asked, seconds=seconds, logged=True)  # type: ignore[arg-type]
        if self._span is not None and gateway.tracing is not None:
            gateway.tracing.end(self._span, self._method, route, status or CLIENT_GONE, self._context)


def endpoint_of(method: str, path: str) -> tuple[Endpoint, str | None]:
    """The engines' endpoint of a path, and the id of the answer that it asks for, where it does. One that nobody knows
    has no path."""
    found = POSTS.get(path) if method == "POST" else None
    if found is not None:
        return found, None
    for (start, end), endpoint in _BY_ID.items():
        if method == endpoint.method and path.startswith(start) and path.endswith(end):
            name = path[len(start) : len(path) - len(end)]
            if name and "/" not in name:
                return endpoint, name
    return Endpoint("", "other"), None
