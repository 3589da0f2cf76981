"""What is counted of a relayed request: the choices of its context, the metrics and the live page. Owns no work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...router.placement import Placement
from ...types import SamplingParams
from ..core.gateway import Gateway
from ..core.request_context import RequestContext
from ..text.choices import Choice, ChoiceJob
from .routing_key import RoutingKey
from .usage import UsageReader

if TYPE_CHECKING:
    from ..core.metrics import Watch

_SAMPLING = SamplingParams()
# Events of a stream before its first token; each one behind them holds a token or more.
_OPENING_EVENTS = {"chat": 1, "messages": 2, "responses": 4}


class RelayProgress:
    """One request's."""

    def __init__(self, gateway: Gateway, context: RequestContext, key: RoutingKey) -> None:
        self._gateway = gateway
        self._context = context
        job = ChoiceJob(0, context.request_id, key.token_ids, _SAMPLING, namespace=key.namespace)
        self._choice = Choice(job)
        self._counted = False
        self._watch: Watch = gateway.metrics.watch(gateway.router.scheduler, [job], context)

    def placed(self, placement: Placement) -> None:
        """A server has begun to answer."""
        choice = self._choice
        choice.worker, choice.decision = placement.worker, placement.decision
        if not self._context.progress.choices:
            self._context.progress.choices.append(choice)

    def first_token(self) -> None:
        """Output has begun. Of an answer that comes in one nobody can say when its first token was there."""
        context = self._context
        if not context.stream:
            return
        context.first_token_seconds = self._watch.first_token(self._choice)
        self._gateway.live.first_token(context.first_token_seconds)

    def finished(self, reader: UsageReader) -> None:
        """The answer is whole."""
        self._counted = True
        choice = self._choice
        self._take_counts(reader, reader.output_tokens or 0)
        reasons = reader.finish_reasons or ("stop",)
        choice.finish_reason = reasons[0]
        for number, reason in enumerate(reasons[1:], 1):  # further choices of the same prompt; their tokens are counted
            further = Choice(ChoiceJob(number, "", choice.job.token_ids, _SAMPLING), decision=choice.decision)
            further.worker, further.finish_reason = choice.worker, reason
            further.reported_prompt_tokens = reader.prompt_tokens
            self._context.progress.choices.append(further)
        for one in self._context.progress.choices:
            self._watch.ended(one)
        self._gateway.live.placed(choice)

    def left(self, reader: UsageReader | None, output_tokens: int, reason: str | None = None) -> None:
        """The server's answer ends before it is whole, after so many tokens: they are counted as any others. `reason`:
        its client gets a whole one nevertheless. Again, and of one that was whole, it does nothing."""
        if self._counted:
            return
        self._counted = True
        choice = self._choice
        if reader is not None:
            self._take_counts(reader, output_tokens)
        if reason is None:
            self._watch.left(choice)
        else:
            choice.finish_reason = reason
            self._watch.ended(choice)

    def _take_counts(self, reader: UsageReader, output_tokens: int) -> None:
        choice = self._choice
        choice.reported_prompt_tokens = reader.prompt_tokens
        choice.cached_tokens = reader.cached_tokens
        choice.output_tokens = output_tokens


def tokens_seen(kind: str, reader: UsageReader, events: int) -> int:
    """Output tokens of a stream that ends early, after so many events: as the server counts them where it has said so,
    else at least as many as there were events with output. Ends the reader."""
    reader.end()
    says_so_far = kind == "generate" or bool(reader.finish_reasons)
    if says_so_far and reader.output_tokens is not None:
        return reader.output_tokens
    return max(events - _OPENING_EVENTS.get(kind, 0), 0)
