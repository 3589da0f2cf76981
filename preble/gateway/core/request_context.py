"""What is known of one HTTP request, from the middleware that lets it in to the line in the log; and the models that
its key may use. Decides nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.requests import Request

from ...types import SessionHint
from ..text.choices import RequestProgress
from .http_errors import ApiError
from .sessions import NO_SESSION


@dataclass(slots=True)
class RequestPhase:
    """One part of a request's way to its worker, by the gateway's clock; of a part that came several times (for each
    prompt or attempt) from its first beginning to its last end."""

    began: float
    ended: float


@dataclass(slots=True)
class RequestContext:
    """What one HTTP request turned out to be, for its log line and the metrics. No prompt, no output."""

    request_id: str
    started: float
    key_name: str = ""
    key_label: str = ""  # the configured name of its key, where its use is counted
    refused: str | None = None  # the code of the error that it was answered with, for want of a right or of room
    model: str = ""
    session: SessionHint = NO_SESSION
    timeout_seconds: float | None = None  # after which the client gives up without a token
    tenant: str | None = None  # whose share of the workers it is served from; None where keys have no shares
    deadline_seconds: float | None = None  # after its arrival, within which its first token is of use
    priority: str | None = None
    group: str | None = None  # the set of samples that it is one of, all of which are waited for
    stream: bool = False
    progress: RequestProgress = field(default_factory=RequestProgress)
    first_token_seconds: float | None = None
    phases: dict[str, RequestPhase] = field(default_factory=dict)  # "tokenize", "match", "decide"
    models: frozenset[str] | None = None  # that the key may use; None: any
    charge: Callable[[int], None] = lambda count: None  # takes so many more of the key's rate
    spend: Callable[[int], None] | None = None  # tells the key's limits what was used, once

    def settle(self) -> None:
        """Tell the key's limits what the request has used; the first call counts."""
        spend, self.spend = self.spend, None
        if spend is not None:
            spend(self.progress.prompt_tokens + self.progress.output_tokens)

    def use_model(self, name: str) -> None:
        """Note the model that is asked for. Raises `ApiError` 403 where the key may not use it."""
        if not self.may_use(name):
            raise self._not_allowed(f"the model {name!r}", "model")
        self.model = name

    def use_adapters(self, base: str, names: Sequence[str] | None) -> None:
        """Adapters of the model `base` are asked for, by names beside the model's; None: nobody can read by which.
        Raises `ApiError` 403 where the key may not use them."""
        if names is None:
            raise self._not_allowed("adapters whose names cannot be read", "lora_path")
        for name in names:
            if not (self.may_use(name) or self.may_use(f"{base}:{name}")):
                raise self._not_allowed(f"the adapter {name!r}", "lora_path")

    def _not_allowed(self, what: str, param: str) -> ApiError:
        served = ", ".join(sorted(self.models or ()))
        message = f"this key may not use {what}; it may use {served}"
        return ApiError(403, message, kind="permission_error", param=param, code="model_not_allowed")

    def may_use(self, name: str) -> bool:
        """Whether the key may use the model."""
        return self.models is None or name in self.models


_CURRENT: ContextVar[RequestContext | None] = ContextVar("preble_request", default=None)


def now_in(context: RequestContext | None) -> None:
    """What this task, and those that it starts, do from now on is done for this request; None: for no request."""
    _CURRENT.set(context)


def note_phase(name: str, seconds: float, now: float) -> None:
    """A part of the current request's way took so long until `now`; nothing to do outside of any request."""
    context = _CURRENT.get()
    if context is None:
        return
    phase = context.phases.get(name)
    if phase is None:
        context.phases[name] = RequestPhase(now - seconds, now)
    else:
        phase.ended = now


def context_of(request: Request) -> RequestContext:
    """The context of a request, made by the middleware."""
    context: RequestContext = request.scope["preble.context"]
    return context
