"""What two ways of sending requests to servers share, the gateway's relay and the endpoint picker: what is learned of
answers (which prompts engines count otherwise, who keeps which answer), and how a request is placed. Owns that both do
it alike; who sends the request, and reads its answer, is theirs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ...router.placement import Placement, PrefillPlace
from ...transport.engine_servers.server_info import EnginePriorities
from ...types import BATCH, Claim
from ..api.http import off_loop
from ..core.header_fields import HeaderFields
from ..core.models import ServedModel
from ..core.request_context import RequestContext
from ..core.sessions import with_body
from .body import RelayedBody, read_body
from .endpoints import Endpoint
from .form import read_form
from .pinned import KeptAnswer, PinnedAnswers
from .routing_key import Mismatches, RoutingKey, routing_key

if TYPE_CHECKING:
    from ..core.gateway import Gateway

WITH_PRIORITY = frozenset({"chat", "completions", "responses", "generate"})  # kinds whose bodies may name one
READ_BYTES = 256 << 10  # of a body that is looked over on the loop, in a tenth of a millisecond


class Learned:
    """Of all requests that come one way. Belongs to its gateway's loop."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.mismatches = Mismatches()
        self.pinned = PinnedAnswers()
        self._numbers = itertools.count(1)  # of requests, whose ids clients may repeat

    async def key_of(self, context: RequestContext, body: RelayedBody, served: ServedModel) -> RoutingKey:
        """Note what a body says of its request; what that is placed by. Raises `ApiError` 403 where its key may not use
        the model, or an adapter that the body names."""
        gateway = self.gateway
        context.use_model(served.name)
        if context.models is not None:
            context.use_adapters(served.base or served.name, body.adapters)
        context.stream = body.stream
        if "prompt_cache_key" in body.fields or "user" in body.fields:
            named = {name: body.text(name) for name in ("prompt_cache_key", "user")}
            context.session = with_body(context.session, **named)
        began = gateway.metrics.clock()
        key = await routing_key(
            body,
            gateway.codec,
            model=context.model,
            engine=served.engine,
            namespace=served.namespace,
            mismatches=self.mismatches,
            tokens_max=served.max_model_tokens,
            events=served.events,
        )
        gateway.metrics.phase("tokenize", gateway.metrics.clock() - began)
        gateway.metrics.relayed(body.endpoint.kind, exact=key.exact)
        return key

    async def place(
        self,
        context: RequestContext,
        body: RelayedBody,
        key: RoutingKey,
        exclude: frozenset[str],
        *,
        client: str,
        separable: bool = False,
    ) -> Placement:
        """A place at a server, by a name of its own; `separable`: at two. Raises as `Router.place`."""
        gateway = self.gateway
        return await gateway.router.place(
            key.token_ids,
            namespace=key.namespace,
            request_id=f"{context.request_id}#{next(self._numbers)}",
            client=client,
            first_token_seconds=gateway.left_seconds(context),
            **gateway.claim_of(context),
            session=context.session or None,
            group=context.group,
            max_new_tokens=body.max_tokens or None,
            exclude=exclude,
            streamed=body.stream,
            separable=separable,
            in_turn=body.endpoint.generates,
        )

    def all_but(self, kept: KeptAnswer | None, exclude: frozenset[str]) -> frozenset[str]:
        """The workers that a request must not go to: where one keeps what it asks for, and is there, all others."""
        ids = self.gateway.router.fleet.worker_ids
        return exclude if kept is None or kept.worker not in ids else exclude.union(ids) - {kept.worker}


async def looked_over(data: bytes, endpoint: Endpoint, headers: HeaderFields) -> RelayedBody:
    """A body that was looked over, beside the loop where that takes long. Raises `ApiError` 400."""
    read: Callable[[bytes, Endpoint], RelayedBody] = read_body
    if endpoint.takes_form:
        read = partial(read_form, content_type=headers.get("content-type"))
    return read(data, endpoint) if len(data) <= READ_BYTES else await off_loop(len(data), read, data, endpoint)


def changes_for(
    placement: Placement | PrefillPlace, body: RelayedBody, served: ServedModel, claim: Claim | None
) -> dict[str, bytes]:
    """What is edited into a body on its way to its server: the rank, as SGLang wants it, the server's own name of the
    model, and the priority of `priority_for`. `claim`: what its worker is given of it."""
    changes: dict[str, bytes] = {}
    priority = priority_for(placement.info.priorities, body, claim)
    if priority is not None:
        changes["priority"] = b"%d" % priority
    if placement.rank is not None and placement.info.engine == "sglang" and body.endpoint.generates:
        changes["routed_dp_rank"] = b"%d" % placement.rank
    if served.sent_name is not None and "model" in body.fields:
        changes["model"] = msgspec.json.encode(served.sent_name)
    return changes


def priority_for(priorities: EnginePriorities, body: RelayedBody, claim: Claim | None) -> int | None:
    """What a body is to have as `priority`; None: as it came. A client's own stays where nobody has a share. That of a
    tenant, or of batch work, may only be later than its class: it orders a tenant's requests among each other, and puts
    them before nobody else's."""
    if body.endpoint.kind not in WITH_PRIORITY:
        return None
    if not body.given("priority"):
        return priorities.of(claim)
    if claim is None or not (claim.tenant or claim.priority == BATCH):
        return None
    return priorities.capped(claim, body.small("priority"))
